//! What the tests of the UCX layer share: patterned memory, and one side of a connection.

#![allow(dead_code)]

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvferry::ucx::{
    Completion, Context, ContextConfig, Endpoint, EndpointOptions, Memory, MemoryKind, Posted, Worker, WorkerOptions,
};

/// Far above what any wait here needs on a busy machine; reaching it fails the test.
pub const LIMIT: Duration = Duration::from_secs(60);

/// The byte at place `index` of the pattern `seed`: other seeds and other places give other bytes.
pub fn pattern(seed: u64, index: usize) -> u8 {
    let mut word = (index as u64 / 8).wrapping_add(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (word ^ (word >> 31)).to_le_bytes()[index % 8]
}

pub fn pattern_bytes(seed: u64, range: std::ops::Range<usize>) -> Vec<u8> {
    range.map(|index| pattern(seed, index)).collect()
}

/// The first place where `bytes` is not the pattern from `first` on.
pub fn mismatch(bytes: &[u8], seed: u64, first: usize) -> Option<usize> {
    bytes.iter().enumerate().find(|(i, byte)| **byte != pattern(seed, first + i)).map(|(i, _)| i)
}

/// Memory that UCX may write at any time, so it is only ever copied in and out.
pub struct Buffer(Box<[UnsafeCell<u8>]>);

impl Buffer {
    pub fn new(len: usize) -> Self {
        Self((0..len).map(|_| UnsafeCell::new(0)).collect())
    }

    pub fn addr(&self) -> usize {
        self.0.as_ptr().expose_provenance()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn fill(&self, seed: u64) {
        for (index, cell) in self.0.iter().enumerate() {
            // SAFETY: the memory is ours and no reference to it exists.
            unsafe { cell.get().write_volatile(pattern(seed, index)) };
        }
    }

    pub fn zero(&self) {
        for cell in &self.0 {
            // SAFETY: as in `fill`.
            unsafe { cell.get().write_volatile(0) };
        }
    }

    pub fn read(&self, range: std::ops::Range<usize>) -> Vec<u8> {
        // SAFETY: as in `fill`.
        self.0[range].iter().map(|cell| unsafe { cell.get().read_volatile() }).collect()
    }
}

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
        let memory = unsafe { context.map(buffer.addr(), len, MemoryKind::Host) }.unwrap();
        Self { worker, memory, buffer, context }
    }

    pub fn connect(&self, address: &[u8]) -> Endpoint {
        self.worker.connect(address, &EndpointOptions::default()).unwrap()
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

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}
