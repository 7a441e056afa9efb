//! Waking the ferry thread from any thread.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use crate::error::Result;
use crate::sync::{Arc, AtomicBool, Signal};

/// Wakes an agent's ferry thread, so that it gives its passenger a turn. Cheap to clone, usable from any thread, also
/// after the agent's end (then it does nothing). Wake-ups that come before the thread has got up count once.
#[derive(Debug, Clone)]
pub struct Waker(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    signal: Signal,
    /// Set from the first wake-up until the thread is up, so that further ones cost no system call.
    pending: AtomicBool,
}

impl Waker {
    pub(super) fn new() -> Result<Self> {
        Ok(Waker(Arc::new(Inner { signal: Signal::new()?, pending: AtomicBool::new(false) })))
    }

    /// Asks for a turn. Never blocks.
    pub fn wake(&self) {
        if !self.0.pending.swap(true, Ordering::AcqRel) {
            self.0.signal.raise();
        }
    }

    /// Ferry thread: takes the wake-ups so far; whatever was queued before them is visible after this.
    pub(super) fn drain(&self) {
        self.0.pending.store(false, Ordering::Release);
        self.0.signal.clear();
        // A wake-up between the two lines above has its write taken by this read while `pending` stays set, and would
        // silence later ones: the swap finds it, and the caller looks at the queues after this anyway.
        self.0.pending.swap(false, Ordering::AcqRel);
    }

    /// What the loop waits on.
    pub(super) fn fd(&self) -> RawFd {
        self.0.signal.fd()
    }

    /// Whether a wake-up is waiting, without a system call.
    pub(super) fn is_pending(&self) -> bool {
        self.0.pending.load(Ordering::Acquire)
    }
}
