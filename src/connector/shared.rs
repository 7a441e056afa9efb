//! What a worker's handle and its passenger on the ferry thread share.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use super::beacon::Beacon;
use super::trace::Tracer;
use crate::error::Result;
use crate::proto::stats::Stats;
use crate::proto::wire::{Message, RankMetadata, WorkerReport};
use crate::proto::worker::{Gauges, Worker as Machine};
use crate::sync::{Arc, AtomicBool, AtomicU64, Condvar, Mutex, MutexGuard};

/// What the handle asks of the passenger.
pub(super) enum Command {
    /// The first command: the state machine to drive, and where the lives of its requests are told.
    Begin(Box<Machine>, Option<Tracer>),
    /// The rank's metadata is complete.
    Local(Arc<RankMetadata>),
    /// A step's encoded work.
    Step(Vec<u8>),
    /// Asks for figures.
    Figures(SyncSender<Figures>),
}

/// Queues and flags. Every lock is held for a queue operation only.
#[derive(Default)]
pub(super) struct Shared {
    commands: Mutex<VecDeque<Command>>,
    report: Mutex<Slot>,
    arrived: Condvar,
    /// Whether `report` holds one, so that polling without one costs a load.
    has_report: AtomicBool,
    /// The same for callers in other languages, of which each call costs much more than a load.
    beacon: Beacon,
    /// Set when the passenger is gone: nothing will be done any more.
    gone: AtomicBool,
    pub(super) malformed_steps: AtomicU64,
    pub(super) malformed_messages: AtomicU64,
}

#[derive(Default)]
struct Slot {
    /// Boxed, since a poller moves it: a report's histograms are kilobytes that another processor wrote.
    held: Option<Box<Held>>,
    /// What a poller that wanted only bytes left behind: the passenger takes it apart, whose time is cheaper.
    spent: Option<Box<Held>>,
}

/// A report that waits to be polled.
struct Held {
    report: WorkerReport,
    /// It, encoded by the passenger: the engine's thread, which polls, has less time. Not for one that was added to.
    encoded: Option<Vec<u8>>,
}

impl Held {
    fn into_bytes(self) -> Result<Vec<u8>> {
        self.encoded.map_or_else(|| self.report.to_bytes(), Ok)
    }
}

/// What the passenger counts.
#[derive(Debug, Clone)]
pub(super) struct Figures {
    pub(super) gauges: Gauges,
    pub(super) totals: Stats,
}

/// A lock that a panic elsewhere does not take away: what it guards is whole between any two statements.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn push(&self, command: Command) {
        lock(&self.commands).push_back(command);
    }

    pub(super) fn pop(&self) -> Option<Command> {
        lock(&self.commands).pop_front()
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    pub(super) fn set_gone(&self) {
        self.gone.store(true, Ordering::Release);
        // Whoever waits for an answer learns that there is none.
        lock(&self.commands).clear();
        // Taking the lock orders this before a waiter's next look.
        drop(lock(&self.report));
        self.arrived.notify_all();
    }

    pub(super) fn publish(&self, report: WorkerReport) {
        // Whether there is an earlier one may have changed when the lock is taken: then this was for nothing.
        let encoded = if self.has_report.load(Ordering::Acquire) { None } else { report.to_bytes().ok() };
        let mut slot = lock(&self.report);
        let spent = slot.spent.take();
        match slot.held.as_mut() {
            Some(earlier) => {
                append(&mut earlier.report, report);
                earlier.encoded = None;
            }
            None => slot.held = Some(Box::new(Held { report, encoded })),
        }
        self.tell(true);
        drop(slot);
        self.arrived.notify_all();
        drop(spent);
    }

    pub(super) fn take_report(&self) -> Option<WorkerReport> {
        self.take().map(|held| held.report)
    }

    /// As `take_report`, encoded.
    pub(super) fn take_encoded(&self) -> Option<Result<Vec<u8>>> {
        self.take().map(|held| held.into_bytes())
    }

    /// As `take_encoded`, copied to the front of `out`: neither allocates nor frees anything. Returns the report's length,
    /// 0 without one. One that is longer than `out` stays.
    pub(super) fn take_into(&self, out: &mut [u8]) -> Result<usize> {
        if !self.has_report.load(Ordering::Acquire) {
            return Ok(0);
        }
        let mut slot = lock(&self.report);
        let Some(held) = slot.held.as_mut() else { return Ok(0) };
        let bytes = match held.encoded.take() {
            Some(bytes) => bytes,
            None => match held.report.to_bytes() {
                Ok(bytes) => bytes,
                Err(error) => {
                    // As with `take_encoded`, it is told once.
                    self.tell(false);
                    slot.spent = slot.held.take();
                    return Err(error);
                }
            },
        };
        let len = bytes.len();
        let front = out.get_mut(..len).map(|front| front.copy_from_slice(&bytes));
        held.encoded = Some(bytes);
        if front.is_some() {
            self.tell(false);
            slot.spent = slot.held.take();
        }
        Ok(len)
    }

    fn take(&self) -> Option<Box<Held>> {
        if !self.has_report.load(Ordering::Acquire) {
            return None;
        }
        let mut slot = lock(&self.report);
        self.tell(false);
        slot.held.take()
    }

    /// Whether there is a report. To be called with its lock held.
    fn tell(&self, has_report: bool) {
        self.has_report.store(has_report, Ordering::Release);
        self.beacon.set(has_report);
    }

    /// Where a byte tells whether there is a report.
    pub(super) fn news(&self) -> *const u8 {
        self.beacon.address()
    }

    /// As `take_report`, but waits for one for at most `timeout`, unless none can come.
    pub(super) fn wait_report(&self, timeout: Duration) -> Option<WorkerReport> {
        self.wait(timeout).map(|held| held.report)
    }

    /// As `wait_report`, encoded.
    pub(super) fn wait_encoded(&self, timeout: Duration) -> Option<Result<Vec<u8>>> {
        self.wait(timeout).map(|held| held.into_bytes())
    }

    fn wait(&self, timeout: Duration) -> Option<Box<Held>> {
        let start = Instant::now();
        let mut slot = lock(&self.report);
        loop {
            if slot.held.is_some() || self.is_gone() {
                self.tell(false);
                return slot.held.take();
            }
            let left = timeout.checked_sub(start.elapsed()).filter(|left| !left.is_zero())?;
            slot = self.arrived.wait_timeout(slot, left).map_or_else(|e| e.into_inner().0, |(slot, _)| slot);
        }
    }
}

/// Adds a later report of the same rank to an earlier one.
fn append(earlier: &mut WorkerReport, later: WorkerReport) {
    let WorkerReport { rank: _, finished_sending, finished_recving, failed_recving, records, stats } = later;
    earlier.finished_sending.extend(finished_sending);
    earlier.finished_recving.extend(finished_recving);
    earlier.failed_recving.extend(failed_recving);
    earlier.records.extend(records);
    earlier.stats.merge(&stats);
}
