//! Waking the ferry thread from any thread.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Error, ErrorKind, Result};

/// Wakes an agent's ferry thread, so that it gives its passenger a turn. Cheap to clone, usable from any thread, also
/// after the agent's end (then it does nothing). Wake-ups that come before the thread has got up count once.
#[derive(Debug, Clone)]
pub struct Waker(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    fd: OwnedFd,
    /// Set from the first wake-up until the thread is up, so that further ones cost no system call.
    pending: AtomicBool,
}

impl Waker {
    pub(super) fn new() -> Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| {
            Error::new(ErrorKind::Io, format!("making an eventfd: {e}; is the open files limit reached?"))
        })?;
        Ok(Waker(Arc::new(Inner { fd, pending: AtomicBool::new(false) })))
    }

    /// Asks for a turn. Never blocks.
    pub fn wake(&self) {
        if !self.0.pending.swap(true, Ordering::AcqRel) {
            // The only error of this write is a full counter, which is readable all the same.
            let _ = rustix::io::write(&self.0.fd, &1u64.to_ne_bytes());
        }
    }

    /// Ferry thread: takes the wake-ups so far; whatever was queued before them is visible after this.
    pub(super) fn drain(&self) {
        self.0.pending.store(false, Ordering::Release);
        let mut count = [0u8; 8];
        // Nothing to read is an error that says just that.
        let _ = rustix::io::read(&self.0.fd, &mut count);
        // A wake-up between the two lines above has its write taken by this read while `pending` stays set, and would
        // silence later ones: the swap finds it, and the caller looks at the queues after this anyway.
        self.0.pending.swap(false, Ordering::AcqRel);
    }

    /// What the loop waits on.
    pub(super) fn fd(&self) -> RawFd {
        self.0.fd.as_raw_fd()
    }

    /// Whether a wake-up is waiting, without a system call.
    pub(super) fn is_pending(&self) -> bool {
        self.0.pending.load(Ordering::Acquire)
    }
}
