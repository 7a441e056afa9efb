//! What the tests of the UCX layer share: one side of a connection, here and in a child.

pub mod child;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvferry::ucx::{Completion, Context, ContextConfig, Endpoint, Memory, MemoryKind, Posted, Worker, WorkerOptions};

use super::memory::Buffer;

/// Far above what any wait here needs on a busy machine; reaching it fails the test.
pub const LIMIT: Duration = Duration::from_secs(60);

/// One side: a worker with registered memory. The memory's registration goes before the memory.
pub struct Side {
    pub worker: Worker,
    pub memory: Arc<Memory>,
    pub buffer: Buffer,
    pub context: Arc<Context>,
}

/// `transports` is a value of UCX_TLS, followed by other settings (`NAME=value`), all parted by semicolons.
pub fn context(transports: &str) -> Arc<Context> {
    let mut parts = transports.split(';');
    let tls = parts.next().map(str::to_owned);
    // Messages are never announced, unless a test says so.
    let settings = std::iter::once("RNDV_THRESH=inf").chain(parts).map(|part| part.split_once('=').unwrap());
    let settings = settings.map(|(n, v)| (n.to_owned(), v.to_owned())).collect();
    let config = ContextConfig { tls, settings, name: "test".to_owned(), ..ContextConfig::default() };
    Context::new(&config).unwrap()
}

impl Side {
    pub fn new(tls: &str, len: usize) -> Self {
        Self::with_options(tls, len, &WorkerOptions::default())
    }

    pub fn with_options(tls: &str, len: usize, options: &WorkerOptions) -> Self {
        let context = context(tls);
        let worker = Worker::with_options(&context, options).unwrap();
        let buffer = Buffer::new(len);
        // SAFETY: the buffer lives as long as this Side, which drops the worker and the registration first.
        let memory = unsafe { context.map(buffer.addr() as usize, len, MemoryKind::Host) }.unwrap();
        Self { worker, memory, buffer, context }
    }

    pub fn connect(&self, address: &[u8]) -> Endpoint {
        self.worker.connect(address, "").unwrap()
    }

    /// The next completion.
    pub fn completion(&self) -> Completion {
        wait("a completion", || {
            self.worker.progress();
            self.worker.poll_completion()
        })
    }

    /// Waits for the operation if it is under way, and demands success.
    pub fn done(&self, posted: Posted, token: u64) {
        if posted == Posted::Pending {
            let completion = self.completion();
            assert_eq!(completion.token, token);
            completion.result.unwrap();
        }
    }
}

/// Repeats `step` until it gives something.
pub fn wait<T>(what: &str, mut step: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(found) = step() {
            return found;
        }
        assert!(Instant::now() < end, "{what} did not come within {LIMIT:?}");
        thread::yield_now();
    }
}
