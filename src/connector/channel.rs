//! The queues between a worker's handle and its driver on the progress thread.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use super::trace::Tracer;
use crate::error::Result;
use crate::proto::stats::Stats;
use crate::proto::wire::{Message, RankMetadata, WorkerReport};
use crate::proto::worker::{MachineGauges, WorkerMachine};
use crate::sync::{Arc, AtomicBool, AtomicU64, Condvar, Mutex, MutexGuard};
use crate::sys::Outbox;

/// A command of the handle to the driver.
pub(super) enum Command {
    /// The first command: the state machine to drive, and where the lives of its requests are told.
    Begin(Box<WorkerMachine>, Option<Tracer>),
    /// The rank's metadata is complete.
    Local(Arc<RankMetadata>),
    /// A step's encoded work.
    Step(Vec<u8>),
    /// Asks for figures.
    Figures(SyncSender<WorkerFigures>),
}

/// Queues and flags. Every lock is held for a queue operation only.
#[derive(Default)]
pub(super) struct WorkerChannel {
    commands: Mutex<VecDeque<Command>>,
    report: Mutex<ReportSlot>,
    arrived: Condvar,
    /// True if `report` may hold one, so that polling without one costs a load.
    has_report: AtomicBool,
    /// Set when the driver is gone: nothing will be done any more.
    gone: AtomicBool,
    /// True if prefills that wait to be loaded are left with their producers at the end.
    pub(super) suspends: AtomicBool,
    pub(super) malformed_steps: AtomicU64,
    pub(super) malformed_messages: AtomicU64,
}

#[derive(Default)]
struct ReportSlot {
    /// Boxed, since a poller moves it: a report's histograms are kilobytes that another processor wrote.
    held: Option<Box<PendingReport>>,
    /// Where reports go first, for callers in other languages, of which each call costs much more than a look.
    outbox: Option<Outbox>,
    /// The report in the outbox. A caller that takes reports by a call gets it too, unless it was read.
    left: Option<Box<PendingReport>>,
}

/// A report that waits to be polled.
struct PendingReport {
    report: WorkerReport,
    /// It, encoded by the driver: the engine's thread, which polls, has less time. Not for one that was added to.
    encoded: Option<Vec<u8>>,
}

impl ReportSlot {
    fn has_left(&self) -> bool {
        self.outbox.as_ref().is_some_and(Outbox::is_full)
    }

    /// Puts a report into the outbox, if it is its turn and there is room.
    fn leave(&mut self, report: &PendingReport) -> bool {
        match (&mut self.outbox, &report.encoded) {
            (Some(outbox), Some(encoded)) => self.held.is_none() && outbox.put(encoded),
            _ => false,
        }
    }

    /// Everything that waits.
    fn take(&mut self) -> Option<Box<PendingReport>> {
        let left = self.left.take();
        let left = match &mut self.outbox {
            Some(outbox) if outbox.is_full() => {
                outbox.clear();
                left
            }
            _ => None,
        };
        match (left, self.held.take()) {
            (Some(mut earlier), Some(later)) => {
                append(&mut earlier.report, later.report);
                earlier.encoded = None;
                Some(earlier)
            }
            (left, held) => held.or(left),
        }
    }
}

impl PendingReport {
    fn into_bytes(self) -> Result<Vec<u8>> {
        self.encoded.map_or_else(|| self.report.to_bytes(), Ok)
    }
}

/// The figures that the driver counts.
#[derive(Debug, Clone)]
pub(super) struct WorkerFigures {
    pub(super) gauges: MachineGauges,
    pub(super) totals: Stats,
}

/// A lock that a panic elsewhere does not take away: what it guards is whole between any two statements.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WorkerChannel {
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

    /// Only the driver does, so nothing is added while it has an earlier report in hand, which no caller sees then.
    pub(super) fn publish(&self, report: WorkerReport) {
        let Some(report) = self.with_earlier(report) else { return };
        let held = Box::new(PendingReport { encoded: report.to_bytes().ok(), report });
        let mut slot = lock(&self.report);
        let mut read = None;
        if slot.leave(&held) {
            read = slot.left.replace(held);
        } else if let Some(earlier) = &mut slot.held {
            // Out of an outbox that was taken away meanwhile.
            append(&mut earlier.report, held.report);
            earlier.encoded = None;
        } else {
            slot.held = Some(held);
        }
        self.tell(&slot);
        drop(slot);
        self.arrived.notify_all();
        // After the waiters are awake.
        drop(read);
    }

    /// `report` with what is still to be taken, if it can go into the outbox then. Otherwise it is added there and None given.
    fn with_earlier(&self, report: WorkerReport) -> Option<WorkerReport> {
        let mut slot = lock(&self.report);
        let has_room = slot.outbox.is_some() && !slot.has_left();
        match &mut slot.held {
            None => Some(report),
            Some(_) if has_room => {
                let mut earlier = slot.held.take()?.report;
                append(&mut earlier, report);
                Some(earlier)
            }
            Some(earlier) => {
                // Not encoded: there may be many more before somebody polls. Whoever waits has been woken by the first.
                append(&mut earlier.report, report);
                earlier.encoded = None;
                None
            }
        }
    }

    /// From now on reports go into `outbox` if it has room. When this returns an earlier outbox is not touched any more; what
    /// was not read in it waits to be taken.
    pub(super) fn set_outbox(&self, outbox: Option<Outbox>) {
        let mut slot = lock(&self.report);
        slot.held = slot.take();
        slot.outbox = outbox;
        self.tell(&slot);
    }

    pub(super) fn take_report(&self) -> Option<WorkerReport> {
        self.take().map(|held| held.report)
    }

    /// As `take_report`, encoded.
    pub(super) fn take_encoded(&self) -> Option<Result<Vec<u8>>> {
        self.take().map(|held| held.into_bytes())
    }

    fn take(&self) -> Option<Box<PendingReport>> {
        if !self.has_report.load(Ordering::Acquire) {
            return None;
        }
        let mut slot = lock(&self.report);
        let held = slot.take();
        self.tell(&slot);
        held
    }

    /// Tells pollers what `slot`, which is locked, holds.
    fn tell(&self, slot: &ReportSlot) {
        self.has_report.store(slot.held.is_some() || slot.has_left(), Ordering::Release);
        if let Some(outbox) = &slot.outbox {
            outbox.set_more(slot.held.is_some());
        }
    }

    /// As `take_report`, but waits for one for at most `timeout`, unless none can come.
    pub(super) fn wait_report(&self, timeout: Duration) -> Option<WorkerReport> {
        self.wait(timeout).map(|held| held.report)
    }

    /// As `wait_report`, encoded.
    pub(super) fn wait_encoded(&self, timeout: Duration) -> Option<Result<Vec<u8>>> {
        self.wait(timeout).map(|held| held.into_bytes())
    }

    /// True if the driver is gone and every report was taken.
    pub(super) fn is_drained(&self) -> bool {
        let slot = lock(&self.report);
        self.is_gone() && slot.held.is_none() && !slot.has_left()
    }

    fn wait(&self, timeout: Duration) -> Option<Box<PendingReport>> {
        let start = Instant::now();
        let mut slot = lock(&self.report);
        loop {
            if slot.held.is_some() || slot.has_left() || self.is_gone() {
                let held = slot.take();
                self.tell(&slot);
                return held;
            }
            let left = timeout.checked_sub(start.elapsed()).filter(|left| !left.is_zero())?;
            slot = self.arrived.wait_timeout(slot, left).map_or_else(|e| e.into_inner().0, |(slot, _)| slot);
        }
    }
}

/// Adds a later report of the same rank to an earlier one.
fn append(earlier: &mut WorkerReport, later: WorkerReport) {
    let WorkerReport { rank: _, granted, finished_sending, finished_recving, failed_recving, records, stats } = later;
    earlier.granted.extend(granted);
    earlier.finished_sending.extend(finished_sending);
    earlier.finished_recving.extend(finished_recving);
    earlier.failed_recving.extend(failed_recving);
    earlier.records.extend(records);
    earlier.stats.merge(&stats);
}
