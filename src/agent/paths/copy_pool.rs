//! Threads that copy memory of this host beside the progress thread.
//!
//! One processor copies less than the memory moves: on two cores, scattered blocks were copied 1.4 to 1.8 times as fast
//! by two threads. A copy thread takes a batch at a time from a short queue; the progress thread fills the queue,
//! copies too, and takes back what nobody has begun when it has nothing else left to post. So nothing waits for a
//! thread that gets no processor.
//!
//! The call that copies returns when every page has been found, and nothing can end it. Where a page comes from a
//! file's server or from another program, that may be never. Such memory is for copy threads only, and one at a time
//! copies such memory of a process, beside those that help with other memory. So a process whose pages do not come
//! holds one thread, which nothing else waits for. Meanwhile the rest of that process's memory is for copy threads too,
//! since a fault that waits may hold the lock of its memory map.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

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

/// Copy threads beside those that help. With more processes whose pages may never come, their memory waits.
const MAX_APART: usize = 64;

/// A batch of a transfer's pieces. While there is a job, the transfer counts it as in flight, and so keeps the regions
/// that the pieces lie in registered.
pub(crate) struct Job {
    pub(crate) transfer: TransferId,
    pub(crate) peer: PeerId,
    pub(crate) neighbour: Arc<Neighbour>,
    pub(crate) direction: Direction,
    pub(crate) batch: Batch,
    /// True if a page may never come, so that only copy threads may copy it.
    pub(crate) is_apart: bool,
}

impl Job {
    /// Copies the batch.
    pub(crate) fn run(mut self) -> Copied {
        let result = self.neighbour.copy(self.direction, &mut self.batch);
        let Job { transfer, peer, batch, is_apart, .. } = self;
        Copied { transfer, peer, batch, is_apart, result }
    }
}

/// A job that was done, or failed.
pub(crate) struct Copied {
    pub(crate) transfer: TransferId,
    pub(crate) peer: PeerId,
    pub(crate) batch: Batch,
    /// As of its job.
    pub(crate) is_apart: bool,
    pub(crate) result: Result<()>,
}

/// A job that a copy thread has.
struct StartedJob {
    peer: PeerId,
    process: Process,
    /// As of its job.
    is_apart: bool,
}

#[derive(Default)]
struct PoolState {
    waiting: VecDeque<Job>,
    copied: Vec<Copied>,
    /// Copy threads that wait for a job.
    asleep: usize,
    /// The jobs of the others, by the copy thread's number.
    running: BTreeMap<u64, StartedJob>,
    /// Threads that there are.
    live: usize,
    /// How many there should be for what the progress thread may copy too.
    helpers: usize,
    closed: bool,
}

impl PoolState {
    /// Tells whether a copy thread copies memory of this process of which a page may never come.
    fn is_held(&self, process: Process) -> bool {
        self.running.values().any(|running| running.is_apart && running.process == process)
    }

    /// Copies that may never end and are under way or could be.
    fn apart(&self) -> usize {
        let waits = |job: &&Job| job.is_apart && !self.is_held(job.neighbour.process());
        self.running.values().filter(|running| running.is_apart).count() + self.waiting.iter().filter(waits).count()
    }

    /// The next job that a copy thread may do.
    fn take(&mut self) -> Option<Job> {
        let next = self.waiting.iter().position(|job| !self.is_held(job.neighbour.process()))?;
        self.waiting.remove(next)
    }

    /// The last job that the progress thread may do.
    fn take_back(&mut self) -> Option<Job> {
        let may_do = |job: &Job| !job.is_apart && !self.is_held(job.neighbour.process());
        let last = self.waiting.iter().rposition(may_do)?;
        self.waiting.remove(last)
    }

    /// Jobs that wait and that the progress thread may do.
    fn shared(&self) -> usize {
        self.waiting.iter().filter(|job| !job.is_apart).count()
    }
}

#[derive(Default)]
struct PoolShared {
    state: Mutex<PoolState>,
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
    shared: Arc<PoolShared>,
    waker: Waker,
    /// Batches to use again.
    spare: Vec<Batch>,
    /// Jobs that were handed over and have not come back.
    outstanding: usize,
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
        }
    }

    /// An empty batch.
    pub(crate) fn batch(&mut self) -> Batch {
        self.spare.pop().unwrap_or_default()
    }

    /// Takes note of a job that was done; `name`: the peer's, if it is known.
    pub(crate) fn finish(&mut self, copied: Copied, name: Option<&str>, effects: &mut Effects) {
        let Copied { transfer, peer, batch, is_apart, result } = copied;
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
        let windowed = (!is_apart).then_some(bytes);
        effects.push(Effect::OperationEnded(OperationEnd { transfer, windowed, moved, result }));
    }

    /// Takes out the jobs of a stopped transfer that no copy thread has begun.
    pub(crate) fn cancel(&mut self, transfer: TransferId, effects: &mut Effects) {
        if self.outstanding == 0 {
            return;
        }
        let mut state = lock(&self.shared.state);
        let (taken, kept): (VecDeque<Job>, _) =
            std::mem::take(&mut state.waiting).into_iter().partition(|job| job.transfer == transfer);
        state.waiting = kept;
        drop(state);
        self.outstanding = self.outstanding.saturating_sub(taken.len());
        for Job { batch, is_apart, .. } in taken {
            let windowed = (!is_apart).then_some(batch.bytes() as u64);
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

    /// Tells whether a copy thread copies memory of this process of which a page may never come.
    pub(crate) fn is_held(&self, neighbour: &Neighbour) -> bool {
        self.outstanding > 0 && lock(&self.shared.state).is_held(neighbour.process())
    }

    /// Whether memory of a peer is being copied, or is to be.
    pub(crate) fn is_copying(&self, peer: PeerId) -> bool {
        if self.outstanding == 0 {
            return false;
        }
        let state = lock(&self.shared.state);
        state.running.values().any(|running| running.peer == peer) || state.waiting.iter().any(|job| job.peer == peer)
    }

    /// Whether a job that the progress thread may do too would find room in the queue: one for each copy thread, beside
    /// the ones being done.
    pub(crate) fn can_help(&mut self) -> bool {
        if self.helpers == 0 {
            return false;
        }
        let mut state = lock(&self.shared.state);
        state.helpers = self.helpers;
        let (shared, apart) = (state.shared(), state.apart().min(MAX_APART));
        drop(state);
        shared < self.helpers && self.make(self.helpers + apart) > apart
    }

    /// Tells whether a job for copy threads only would find room in the queue, which has room for one of each process.
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] when no thread is free for it, and none can be made.
    pub(crate) fn can_copy(&mut self, neighbour: &Neighbour) -> Result<bool> {
        let process = neighbour.process();
        let state = lock(&self.shared.state);
        let (is_held, helpers, apart) = (state.is_held(process), state.helpers, state.apart());
        let waits = state.waiting.iter().any(|job| job.is_apart && job.neighbour.process() == process);
        drop(state);
        if waits || is_held {
            return Ok(!waits);
        }
        if apart >= MAX_APART {
            return Ok(false);
        }
        if self.make(helpers + apart + 1) > apart {
            return Ok(true);
        }
        Err(Error::new(
            ErrorKind::Exhausted,
            "no thread can be started to copy memory of another process; raise the limit of threads (RLIMIT_NPROC, \
             pids.max)",
        ))
    }

    /// Hands a job over.
    pub(crate) fn submit(&mut self, job: Job) {
        self.outstanding += 1;
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
        let job = lock(&self.shared.state).take_back()?;
        self.outstanding = self.outstanding.saturating_sub(1);
        Some(job)
    }

    /// Takes the jobs that copy threads have done since the last time.
    pub(crate) fn reap(&mut self) -> Vec<Copied> {
        // Cleared first: a thread that adds to the list afterwards raises it again.
        if self.outstanding == 0 || !self.shared.news.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        let copied = std::mem::take(&mut lock(&self.shared.state).copied);
        self.outstanding = self.outstanding.saturating_sub(copied.len());
        copied
    }

    /// Makes copy threads until there are so many. Returns how many there are.
    fn make(&mut self, wanted: usize) -> usize {
        let mut live = lock(&self.shared.state).live;
        if live >= wanted {
            return live;
        }
        self.threads.retain(|thread| !thread.is_finished());
        while live < wanted {
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
        live
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

/// A copy thread.
fn run(shared: &PoolShared, waker: &Waker, number: u64) {
    let mut state = lock(&shared.state);
    loop {
        if let Some(job) = state.take() {
            let Job { peer, is_apart, .. } = job;
            state.running.insert(number, StartedJob { peer, process: job.neighbour.process(), is_apart });
            drop(state);
            let copied = job.run();
            state = lock(&shared.state);
            state.running.remove(&number);
            state.copied.push(copied);
            shared.news.store(true, Ordering::Release);
            waker.wake();
            if is_apart && !state.waiting.is_empty() {
                // Jobs may have waited for this copy to end; this thread may end too.
                shared.job.notify_one();
            }
            // One stays, so that none has to be made for each job of one process.
            if state.live > (state.helpers + state.apart()).max(1) {
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
    fn process_holds_one_thread() {
        let (ids, here) = (Live::new(1).ids, ProcessPlace::here().unwrap());
        let witnesses = [7, 8].map(|incarnation| (incarnation, Witness::new(incarnation, b"address")));
        let [one, other] = witnesses.each_ref().map(|(incarnation, witness)| {
            witness.answer((3, 4));
            Arc::new(Neighbour::find(&witness.place(&here), *incarnation, (3, 4), b"address").unwrap().unwrap())
        });
        let jobs = [(&one, true), (&one, false), (&one, true), (&other, true), (&other, false)];
        let jobs = jobs.map(|(neighbour, is_apart)| Job {
            transfer: ids.transfer().unwrap(),
            peer: ids.peer().unwrap(),
            neighbour: Arc::clone(neighbour),
            direction: Direction::Read,
            batch: Batch::default(),
            is_apart,
        });
        let mut state = PoolState { waiting: jobs.into(), ..PoolState::default() };
        let taken = |state: &mut PoolState, number: u64| {
            let Job { peer, neighbour, is_apart, .. } = state.take()?;
            state.running.insert(number, StartedJob { peer, process: neighbour.process(), is_apart });
            Some((neighbour.process().1, is_apart))
        };
        assert_eq!([1, 2, 3].map(|number| taken(&mut state, number)), [Some((7, true)), Some((8, true)), None]);
        assert_eq!((state.apart(), state.shared()), (2, 2));
        assert!(state.take_back().is_none());
        // The progress thread's is the last one, and only of a process that holds no thread.
        state.running.remove(&1);
        assert_eq!(state.take_back().unwrap().neighbour.process(), one.process());
        assert_eq!([1, 3].map(|number| taken(&mut state, number)), [Some((7, true)), None]);
        state.running.remove(&2);
        assert_eq!((taken(&mut state, 2), state.apart()), (Some((8, false)), 1));
    }
}
