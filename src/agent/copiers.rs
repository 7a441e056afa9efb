//! Threads that copy memory of this host beside the ferry thread.
//!
//! One processor copies less than the memory moves: on two cores, scattered blocks were copied 1.4 to 1.8 times as fast by two
//! threads. A copier takes a batch at a time from a short queue; the ferry thread fills the queue, copies too, and takes back
//! what nobody has begun when it has nothing else left to post. So nothing waits for a thread that gets no processor.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use super::ids::{PeerId, TransferId};
use super::shared::lock;
use super::sidestep;
use super::waker::Waker;
use crate::error::Result;
use crate::mem::process::{Batch, Neighbour, Way};
use crate::sync::{Arc, AtomicBool, Condvar, Mutex};

/// A batch of a transfer's pieces. While there is a job, the transfer counts it as in flight, and so keeps the regions that the
/// pieces lie in registered.
pub(super) struct Job {
    pub(super) transfer: TransferId,
    pub(super) peer: PeerId,
    pub(super) neighbour: Arc<Neighbour>,
    pub(super) way: Way,
    pub(super) batch: Batch,
    /// The processor of the ferry thread, which a copier leaves to it.
    pub(super) ferry_processor: usize,
}

impl Job {
    /// Copies the batch.
    pub(super) fn run(mut self) -> Copied {
        let result = self.neighbour.copy(self.way, &mut self.batch);
        Copied { transfer: self.transfer, peer: self.peer, batch: self.batch, result }
    }
}

/// A job that was done, or failed.
pub(super) struct Copied {
    pub(super) transfer: TransferId,
    pub(super) peer: PeerId,
    pub(super) batch: Batch,
    pub(super) result: Result<()>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    copied: Vec<Copied>,
    /// Copiers that wait for a job.
    asleep: usize,
    /// Copiers that have one.
    busy: usize,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    job: Condvar,
    /// Whether `copied` may hold something, for a look without the lock.
    news: AtomicBool,
}

/// The copiers of one agent, made when there is something for them.
pub(super) struct Copiers {
    /// How many there should be.
    wanted: usize,
    threads: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
    waker: Waker,
    /// Batches to use again.
    spare: Vec<Batch>,
}

impl Copiers {
    /// For `threads` that copy, the ferry thread among them. More than processors would take turns with it.
    pub(super) fn new(threads: u32, waker: Waker) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let wanted = processors.min(threads as usize).saturating_sub(1);
        Copiers { wanted, threads: Vec::new(), shared: Arc::default(), waker, spare: Vec::new() }
    }

    /// An empty batch.
    pub(super) fn batch(&mut self) -> Batch {
        self.spare.pop().unwrap_or_default()
    }

    /// Takes a batch back.
    pub(super) fn give_back(&mut self, mut batch: Batch) {
        batch.clear();
        self.spare.push(batch);
    }

    /// Whether a job would find room in the queue: one for each copier, beside the ones being done.
    pub(super) fn has_room(&mut self) -> bool {
        self.start();
        !self.threads.is_empty() && lock(&self.shared.state).waiting.len() < self.threads.len()
    }

    /// Hands a job over.
    pub(super) fn submit(&self, job: Job) {
        let mut state = lock(&self.shared.state);
        state.waiting.push_back(job);
        let wake = state.asleep > 0;
        drop(state);
        if wake {
            self.shared.job.notify_one();
        }
    }

    /// A job that no copier has begun.
    pub(super) fn take_back(&self) -> Option<Job> {
        if self.threads.is_empty() { None } else { lock(&self.shared.state).waiting.pop_back() }
    }

    /// What the copiers have done since the last time.
    pub(super) fn reap(&self) -> Vec<Copied> {
        // Cleared first: whoever adds to the list afterwards raises it again.
        if self.threads.is_empty() || !self.shared.news.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        std::mem::take(&mut lock(&self.shared.state).copied)
    }

    fn start(&mut self) {
        while self.threads.len() < self.wanted {
            let (shared, waker) = (Arc::clone(&self.shared), self.waker.clone());
            let thread = std::thread::Builder::new().name("kvf-copy".to_owned()).spawn(move || run(&shared, &waker));
            match thread {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    log::warn!("starting a thread to copy: {error}; the ferry thread copies alone");
                    self.wanted = self.threads.len();
                }
            }
        }
    }
}

impl Drop for Copiers {
    /// Ends the threads. One that is still copying, which nothing can stop, ends by itself: whoever drops this with transfers
    /// in flight has told their owner that the memory must stay alive.
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        state.closed = true;
        state.waiting.clear();
        let busy = state.busy > 0;
        drop(state);
        self.shared.job.notify_all();
        if !busy {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

/// A copier.
fn run(shared: &Shared, waker: &Waker) {
    let mut state = lock(&shared.state);
    loop {
        if let Some(job) = state.waiting.pop_front() {
            state.busy += 1;
            drop(state);
            sidestep::leave(job.ferry_processor);
            let copied = job.run();
            state = lock(&shared.state);
            state.busy -= 1;
            state.copied.push(copied);
            shared.news.store(true, Ordering::Release);
            waker.wake();
        } else if state.closed {
            return;
        } else {
            state.asleep += 1;
            state = shared.job.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
            state.asleep -= 1;
        }
    }
}
