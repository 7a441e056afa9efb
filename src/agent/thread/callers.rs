//! Callers that poll without a pause, and whether they drive the engine in the progress thread's place.
//!
//! A caller that waits for a small transfer by polling has a processor already. Handing the transfer to the progress
//! thread and its end back takes two wake-ups, which cost more than the transfer, and a second processor. So a caller that
//! polls without a pause drives the engine whenever that is free. When it goes on, the progress thread stands aside: it
//! sleeps until the caller could have stopped at the earliest, looks, and takes over if it has. Each look takes a processor
//! from the caller, so it looks no more often than that.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::sync::{AtomicBool, AtomicU64};

/// Polls with longer pauses between them are not without a pause, as long as the progress thread does not stand aside.
const PAUSE: Duration = Duration::from_micros(50);
/// After so many polls without a pause, a caller drives the engine if that is free, as the progress thread may have to wait
/// for a processor.
pub(super) const SOME: u64 = 16;
/// So many polls without a pause make a caller that waits. Who only collects what has happened, as an engine does in
/// each of its steps, polls less often.
pub(super) const MANY: u64 = 32;
/// How often the progress thread is asked to stand aside while it does not.
pub(super) const ASK_EVERY: u64 = 1024;
/// How long callers leave an engine alone that has something long to do.
const LEAVE_ALONE: Duration = Duration::from_millis(1);
/// How long nobody has polled when the progress thread takes over: long enough for a caller to look after something else
/// between two small transfers.
const PATIENCE: Duration = Duration::from_millis(1);

/// What a poll that found nothing is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Polled {
    /// Nothing: the progress thread has its own reasons to work.
    Nothing,
    /// Ask the progress thread to stand aside, and drive the engine.
    Ask,
    /// Drive the engine if it is free.
    Drive,
}

/// Shared by the handle and the progress thread.
#[derive(Debug)]
pub(crate) struct Callers {
    start: Instant,
    /// Nanoseconds from `start` to the last poll.
    last: AtomicU64,
    /// Polls without a pause so far.
    polls: AtomicU64,
    /// Nanoseconds from `start` to when callers may look again whether the engine has only little to do.
    again: AtomicU64,
    /// Whether the progress thread stands aside. Changed only by who has the engine.
    drive: AtomicBool,
    /// Whether the progress thread waits for the engine: locks are not fair, and callers that take it again and again would
    /// keep it from that thread for long.
    wanted: AtomicBool,
}

impl Callers {
    pub(crate) fn new(now: Instant) -> Self {
        Callers {
            start: now,
            last: AtomicU64::new(0),
            polls: AtomicU64::new(0),
            again: AtomicU64::new(0),
            drive: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
        }
    }

    fn since_start(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }

    fn is_within(&self, last: u64, now: u64, limit: Duration) -> bool {
        u128::from(now.saturating_sub(last)) < limit.as_nanos()
    }

    /// A caller has polled and found nothing. None of the counts has to be exact, so callers need not agree about them.
    pub(crate) fn poll(&self, now: Instant) -> Polled {
        let now = self.since_start(now);
        let last = self.last.swap(now, Ordering::Relaxed);
        let drive = self.drive();
        if !self.is_within(last, now, if drive { PATIENCE } else { PAUSE }) {
            self.polls.store(0, Ordering::Relaxed);
            return Polled::Nothing;
        }
        let polls = self.polls.fetch_add(1, Ordering::Relaxed);
        if polls < SOME || now < self.again.load(Ordering::Relaxed) {
            Polled::Nothing
        } else if !drive && polls >= MANY && (polls - MANY).is_multiple_of(ASK_EVERY) {
            Polled::Ask
        } else {
            Polled::Drive
        }
    }

    /// A caller has found something long to do, which is the progress thread's; for who has the engine.
    pub(crate) fn leave_alone(&self, now: Instant) {
        self.again.store(self.since_start(now) + LEAVE_ALONE.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Whether a caller polls without a pause.
    pub(crate) fn are_polling(&self, now: Instant) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        self.polls.load(Ordering::Relaxed) >= MANY && self.is_within(last, self.since_start(now), PATIENCE)
    }

    /// How long the last poll still counts: before that is over, nobody is taken to have stopped.
    pub(crate) fn patience_left(&self, now: Instant) -> Duration {
        let since = self.since_start(now).saturating_sub(self.last.load(Ordering::Relaxed));
        PATIENCE.saturating_sub(Duration::from_nanos(since))
    }

    /// Whether callers drive the engine in the progress thread's place. Who has the engine can rely on it.
    pub(crate) fn drive(&self) -> bool {
        self.drive.load(Ordering::Relaxed)
    }

    /// The progress thread waits for the engine, or does not any more.
    pub(crate) fn want(&self, wanted: bool) {
        self.wanted.store(wanted, Ordering::Relaxed);
    }

    /// Whether a caller may take the engine if it is free.
    pub(crate) fn may_take(&self) -> bool {
        !self.wanted.load(Ordering::Relaxed)
    }

    /// The progress thread stands aside; for who has the engine.
    pub(crate) fn enter(&self) {
        self.drive.store(true, Ordering::Relaxed);
    }

    /// The progress thread drives the engine; for who has the engine.
    pub(crate) fn leave(&self) {
        self.drive.store(false, Ordering::Relaxed);
    }
}
