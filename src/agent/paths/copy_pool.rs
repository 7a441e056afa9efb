//! Threads that copy memory of this host beside the progress thread.
//!
//! One processor copies less than the memory moves: on two cores, scattered blocks were copied 1.4 to 1.8 times as fast
//! by two threads. A copy thread takes a batch at a time from a short queue; the progress thread fills the queue,
//! copies too, and takes back what nobody has begun when it has nothing else left to post. So nothing waits for a
//! thread that gets no processor.
//!
//! The call that copies returns when every page has been found, and nothing can end it. Where a page comes from a
//! file's server or from another program, that may be never. Such memory is for copy threads only; one whose call takes
//! too long counts as stuck: another takes its place, and nothing more of that process is copied until it is back.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::agent::core::effect::{Effect, Effects, OperationEnd};
use crate::agent::core::ids::{PeerId, TransferId};
use crate::agent::core::live::lock;
use crate::agent::core::stats::PathBytes;
use crate::agent::thread::waker::Waker;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::Direction;
use crate::sync::{Arc, AtomicBool, Condvar, Mutex};
use crate::sys::process::{Batch, Neighbour, Process};
use crate::sys::thread::spawn;

/// A call that takes longer is stuck. Half a megabyte takes less than a millisecond where its pages are there.
const STUCK: Duration = Duration::from_millis(250);
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// Copy threads that may be stuck at a time. With more, no other takes their place, and memory that is for copy threads
/// only waits.
const MAX_STUCK: usize = 64;

/// A batch of a transfer's pieces. While there is a job, the transfer counts it as in flight, and so keeps the regions
/// that the pieces lie in registered.
pub(crate) struct Job {
    pub(crate) transfer: TransferId,
    pub(crate) peer: PeerId,
    pub(crate) neighbour: Arc<Neighbour>,
    pub(crate) direction: Direction,
    pub(crate) batch: Batch,
    /// Whether the kernel fills all pages by itself, so that the progress thread may copy them too.
    pub(crate) is_filled_by_kernel: bool,
}

impl Job {
    /// Copies the batch.
    pub(crate) fn run(mut self) -> Copied {
        let result = self.neighbour.copy(self.direction, &mut self.batch);
        let Job { transfer, peer, batch, is_filled_by_kernel, .. } = self;
        Copied { transfer, peer, batch, is_filled_by_kernel, result }
    }
}

/// A job that was done, or failed.
pub(crate) struct Copied {
    pub(crate) transfer: TransferId,
    pub(crate) peer: PeerId,
    pub(crate) batch: Batch,
    /// As of its job.
    pub(crate) is_filled_by_kernel: bool,
    pub(crate) result: Result<()>,
}

/// A job that a copy thread has.
struct Running {
    peer: PeerId,
    process: Process,
    since: Instant,
    /// Whether it may have to wait for somebody: else whoever is late has only got no processor.
    may_be_stuck: bool,
    stuck: bool,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    copied: Vec<Copied>,
    /// Copy threads that wait for a job.
    asleep: usize,
    /// What the others do, by the copy thread's number.
    running: BTreeMap<u64, Running>,
    /// Threads that there are.
    live: usize,
    /// How many there should be that are not stuck.
    wanted: usize,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    job: Condvar,
    /// Whether `copied` may hold something, for a look without the lock.
    news: AtomicBool,
}

/// The copy threads of one agent, made when there is something for them.
pub(crate) struct CopyPool {
    /// How many help the progress thread.
    helpers: usize,
    threads: Vec<JoinHandle<()>>,
    /// How many of them were made.
    made: u64,
    shared: Arc<Shared>,
    waker: Waker,
    /// Batches to use again.
    spare: Vec<Batch>,
    /// Jobs that were handed over and have not come back.
    outstanding: usize,
    /// Processes that a copy thread is stuck with, under whatever connection.
    stuck: Vec<Process>,
    /// Jobs of those that no copy thread has begun.
    withheld: Vec<Job>,
    /// When to look next whether any is stuck.
    look_at: Option<Instant>,
}

impl CopyPool {
    /// For `threads` that copy, the progress thread among them. More than processors would take turns with it.
    pub(crate) fn new(threads: u32, waker: Waker) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        CopyPool {
            helpers: processors.min(threads as usize).saturating_sub(1),
            threads: Vec::new(),
            made: 0,
            shared: Arc::default(),
            waker,
            spare: Vec::new(),
            outstanding: 0,
            stuck: Vec::new(),
            withheld: Vec::new(),
            look_at: None,
        }
    }

    /// An empty batch.
    pub(crate) fn batch(&mut self) -> Batch {
        self.spare.pop().unwrap_or_default()
    }

    /// Takes note of a job that was done; `name`: the peer's, if it is known.
    pub(crate) fn finish(&mut self, copied: Copied, name: Option<&str>, effects: &mut Effects) {
        let Copied { transfer, peer, batch, is_filled_by_kernel, result } = copied;
        let bytes = batch.bytes() as u64;
        self.give_back(batch);
        let result = result.map_err(|error| match name {
            Some(name) => error.context(format!("agent {name}")),
            None => error,
        });
        if let Err(error) = &result
            && error.kind() == ErrorKind::PeerDied
        {
            effects.lose(peer, error.clone());
        }
        let moved = PathBytes { copied: if result.is_ok() { bytes } else { 0 }, ..PathBytes::default() };
        let windowed = is_filled_by_kernel.then_some(bytes);
        effects.push(Effect::OperationEnded(OperationEnd { transfer, windowed, moved, result }));
    }

    /// Takes out the jobs of a stopped transfer that no copy thread has begun.
    pub(crate) fn withdraw(&mut self, transfer: TransferId, effects: &mut Effects) {
        for Job { batch, is_filled_by_kernel, .. } in self.take_of(transfer) {
            let windowed = is_filled_by_kernel.then_some(batch.bytes() as u64);
            self.give_back(batch);
            effects.push(Effect::OperationEnded(OperationEnd {
                transfer,
                windowed,
                moved: PathBytes::default(),
                result: Ok(()),
            }));
        }
    }

    /// Takes a batch back.
    pub(crate) fn give_back(&mut self, mut batch: Batch) {
        batch.clear();
        self.spare.push(batch);
    }

    /// Whether a copy thread is stuck with this process, of which nothing more is copied until it is back.
    pub(crate) fn is_stuck(&self, neighbour: &Neighbour) -> bool {
        !self.stuck.is_empty() && self.stuck.contains(&neighbour.process())
    }

    /// Whether memory of a peer is being copied, or is to be.
    pub(crate) fn is_copying(&self, peer: PeerId) -> bool {
        if self.outstanding == 0 {
            return false;
        }
        let state = lock(&self.shared.state);
        let mut jobs = state.waiting.iter().chain(&self.withheld);
        state.running.values().any(|running| running.peer == peer) || jobs.any(|job| job.peer == peer)
    }

    /// Whether a job that the progress thread may do too would find room in the queue: one for each copy thread, beside
    /// the ones being done.
    pub(crate) fn can_help(&mut self) -> bool {
        self.helpers > 0 && self.make(self.helpers) > 0 && self.waiting() < self.helpers
    }

    /// Whether a job that is for copy threads only would find room in the queue.
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] when there are none, and none can be made.
    pub(crate) fn can_copy(&mut self) -> Result<bool> {
        let wanted = self.helpers.max(1);
        if self.make(wanted) == 0 && self.stuck.is_empty() {
            return Err(Error::new(
                ErrorKind::Exhausted,
                "no thread can be started to copy memory of another process; raise the limit of threads (RLIMIT_NPROC, \
                 pids.max)",
            ));
        }
        Ok(self.waiting() < wanted)
    }

    fn waiting(&self) -> usize {
        lock(&self.shared.state).waiting.len()
    }

    /// Copy threads that are stuck.
    fn stuck_threads(state: &State) -> usize {
        state.running.values().filter(|running| running.stuck).count()
    }

    /// Hands a job over.
    pub(crate) fn submit(&mut self, job: Job) {
        self.outstanding += 1;
        self.look_at.get_or_insert_with(|| Instant::now() + LOOK);
        let mut state = lock(&self.shared.state);
        state.waiting.push_back(job);
        let wake = state.asleep > 0;
        drop(state);
        if wake {
            self.shared.job.notify_one();
        }
    }

    /// A job that no copy thread has begun and the progress thread may do.
    pub(crate) fn take_back(&mut self) -> Option<Job> {
        if self.outstanding == 0 {
            return None;
        }
        let mut state = lock(&self.shared.state);
        let last = state.waiting.iter().rposition(|job| job.is_filled_by_kernel)?;
        let job = state.waiting.remove(last);
        self.outstanding = self.outstanding.saturating_sub(job.iter().len());
        job
    }

    fn take_of(&mut self, transfer: TransferId) -> Vec<Job> {
        if self.outstanding == 0 {
            return Vec::new();
        }
        let mut state = lock(&self.shared.state);
        let mut taken = take_where(&mut state.waiting, |job| job.transfer == transfer);
        drop(state);
        taken.extend(self.withheld.extract_if(.., |job| job.transfer == transfer));
        self.outstanding = self.outstanding.saturating_sub(taken.len());
        taken
    }

    /// What the copy threads have done since the last time.
    pub(crate) fn reap(&mut self) -> Vec<Copied> {
        // Cleared first: whoever adds to the list afterwards raises it again.
        if self.outstanding == 0 || !self.shared.news.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        let copied = std::mem::take(&mut lock(&self.shared.state).copied);
        self.outstanding = self.outstanding.saturating_sub(copied.len());
        if !self.stuck.is_empty() {
            self.look(Instant::now());
        }
        if self.outstanding == 0 {
            self.look_at = None;
        }
        copied
    }

    /// When to look whether any copy thread is stuck.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.look_at
    }

    /// Looks whether any copy thread is stuck, if it is time to.
    pub(crate) fn check(&mut self, now: Instant) {
        if self.look_at.is_some_and(|at| at <= now) {
            self.look(now);
            self.look_at = if self.outstanding > 0 { now.checked_add(LOOK) } else { None };
        }
    }

    fn look(&mut self, now: Instant) {
        let mut guard = lock(&self.shared.state);
        let state = &mut *guard;
        for running in state.running.values_mut() {
            running.stuck |= running.may_be_stuck && now.saturating_duration_since(running.since) >= STUCK;
        }
        let stuck: Vec<Process> = state.running.values().filter(|r| r.stuck).map(|r| r.process).collect();
        if stuck.is_empty() && self.stuck.is_empty() {
            return;
        }
        // Whoever is back goes on where it was.
        state.waiting.extend(self.withheld.drain(..));
        let withheld = take_where(&mut state.waiting, |job| stuck.contains(&job.neighbour.process()));
        let waits = !state.waiting.is_empty();
        drop(guard);
        for (pid, _) in stuck.iter().filter(|process| !self.stuck.contains(process)) {
            log::warn!(
                "process {pid}: a page of its memory is not there after {STUCK:?}; nothing more of it is copied until it is"
            );
        }
        if stuck.len() >= MAX_STUCK && self.stuck.len() < MAX_STUCK {
            log::error!(
                "{MAX_STUCK} threads wait for pages of other processes that do not come; no others are started"
            );
        }
        (self.stuck, self.withheld) = (stuck, withheld);
        if waits {
            self.make(self.helpers.max(1));
            self.shared.job.notify_all();
        }
    }

    /// Makes copy threads, until so many are not stuck. Returns how many are not.
    fn make(&mut self, wanted: usize) -> usize {
        let mut state = lock(&self.shared.state);
        state.wanted = state.wanted.max(wanted);
        let stuck = Self::stuck_threads(&state);
        let mut live = state.live;
        drop(state);
        if live >= wanted + stuck.min(MAX_STUCK) {
            return live.saturating_sub(stuck);
        }
        self.threads.retain(|thread| !thread.is_finished());
        while live < wanted + stuck.min(MAX_STUCK) {
            let (shared, waker, number) = (Arc::clone(&self.shared), self.waker.clone(), self.made);
            let run = move || run(&shared, &waker, number);
            match spawn("kvf-copy", run) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    log::debug!("starting a thread to copy: {error}");
                    break;
                }
            }
            self.made += 1;
            live += 1;
            lock(&self.shared.state).live += 1;
        }
        live.saturating_sub(stuck)
    }
}

impl Drop for CopyPool {
    /// Ends the threads. One that is still copying, which nothing can stop, ends by itself: whoever drops this with transfers
    /// in flight has told their owner that the memory must stay alive.
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        state.closed = true;
        state.waiting.clear();
        let busy = !state.running.is_empty();
        drop(state);
        self.shared.job.notify_all();
        if !busy {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

/// Takes some jobs out of a queue.
fn take_where(queue: &mut VecDeque<Job>, wanted: impl FnMut(&Job) -> bool) -> Vec<Job> {
    let (taken, kept): (Vec<Job>, Vec<Job>) = std::mem::take(queue).into_iter().partition(wanted);
    *queue = kept.into();
    taken
}

/// A copy thread.
fn run(shared: &Shared, waker: &Waker, number: u64) {
    let mut state = lock(&shared.state);
    loop {
        if let Some(job) = state.waiting.pop_front() {
            let (peer, process, may_be_stuck) = (job.peer, job.neighbour.process(), !job.is_filled_by_kernel);
            state.running.insert(number, Running { peer, process, since: Instant::now(), may_be_stuck, stuck: false });
            drop(state);
            let copied = job.run();
            state = lock(&shared.state);
            state.running.remove(&number);
            state.copied.push(copied);
            shared.news.store(true, Ordering::Release);
            waker.wake();
            // Where another has its place.
            if state.live > state.wanted + CopyPool::stuck_threads(&state) {
                state.live -= 1;
                return;
            }
        } else if state.closed {
            return;
        } else {
            state.asleep += 1;
            state = shared.job.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
            state.asleep -= 1;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::agent::core::live::Live;
    use crate::sys::process::{ProcessPlace, Witness};

    #[test]
    fn without_a_job_nothing_is_looked_at() {
        let witness = Witness::new(7, b"address");
        witness.answer((3, 4));
        let neighbour =
            Neighbour::find(&witness.place(&ProcessPlace::here().unwrap()), 7, (3, 4), b"address").unwrap().unwrap();
        let ids = Live::new(1).ids;
        let mut pool = CopyPool::new(2, Waker::new().unwrap());
        pool.submit(Job {
            transfer: ids.transfer().unwrap(),
            peer: ids.peer().unwrap(),
            neighbour: Arc::new(neighbour),
            direction: Direction::Read,
            batch: Batch::default(),
            is_filled_by_kernel: true,
        });
        let at = pool.deadline().unwrap();
        assert!(pool.take_back().is_some() && pool.take_back().is_none());
        pool.check(at);
        assert_eq!(pool.deadline(), None);
    }
}
