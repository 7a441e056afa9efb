//! Waking the progress thread from any thread.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use crate::error::Result;
use crate::sync::{Arc, AtomicU8, Signal};

/// There was a wake-up that the thread has not taken.
const PENDING: u8 = 1;
/// The thread sleeps on the descriptor, or is about to.
const ASLEEP: u8 = 2;

/// Wakes an agent's progress thread, so that it gives its driver a turn. Cheap to clone, usable from any thread, also
/// after the agent's end (then it does nothing). Wake-ups that come before the thread has got up count once, and those of
/// a thread that is up cost no system call.
#[derive(Debug, Clone)]
pub struct Waker(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    signal: Signal,
    /// [`PENDING`] and [`ASLEEP`] in one, so that a wake-up and a thread that lies down cannot miss each other.
    state: AtomicU8,
}

impl Waker {
    pub(crate) fn new() -> Result<Self> {
        Ok(Waker(Arc::new(Inner { signal: Signal::new()?, state: AtomicU8::new(0) })))
    }

    /// Asks for a turn. Never blocks.
    pub fn wake(&self) {
        let before = self.0.state.fetch_or(PENDING, Ordering::AcqRel);
        // Also when another wake-up is pending: whoever left that may not have come to raise the signal yet.
        if before & ASLEEP != 0 {
            self.0.signal.raise();
        }
    }

    /// Progress thread: takes the wake-ups so far and returns whether there were any; whatever was queued before them is
    /// visible after this.
    pub(crate) fn take(&self) -> bool {
        self.is_pending() && self.0.state.fetch_and(!PENDING, Ordering::AcqRel) & PENDING != 0
    }

    /// Progress thread: to be called before sleeping on the descriptor, with [`get_up`](Self::get_up) after it. Returns
    /// whether to sleep: not when a wake-up is pending.
    pub(crate) fn lie_down(&self) -> bool {
        self.0.state.fetch_or(ASLEEP, Ordering::AcqRel) & PENDING == 0
    }

    /// Progress thread: it is up again; `is_readable` is what polling said about the descriptor.
    ///
    /// Who wakes may be interrupted before raising the signal, and raise it when the thread is long up and has taken the
    /// wake-up. So a readable descriptor is always cleared here, or the thread would not sleep until the next wake-up.
    pub(crate) fn get_up(&self, is_readable: bool) {
        self.0.state.fetch_and(!ASLEEP, Ordering::AcqRel);
        if is_readable {
            self.0.signal.clear();
        }
    }

    /// What the loop waits on.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.signal.fd()
    }

    /// Whether a wake-up is waiting, without a system call.
    pub(crate) fn is_pending(&self) -> bool {
        self.0.state.load(Ordering::Acquire) & PENDING != 0
    }
}
