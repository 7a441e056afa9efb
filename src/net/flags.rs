//! The flags that a listener's handle and its thread share.

use std::os::fd::RawFd;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use crate::error::{Error, Result};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Signal};

#[derive(Debug)]
pub(super) struct ListenerFlags {
    wake: Signal,
    stop: AtomicBool,
    alive: AtomicBool,
    requests: AtomicU64,
    failure: Mutex<Option<Error>>,
}

impl ListenerFlags {
    pub(super) fn new() -> Result<ListenerFlags> {
        Ok(ListenerFlags {
            wake: Signal::new()?,
            stop: AtomicBool::new(false),
            alive: AtomicBool::new(true),
            requests: AtomicU64::new(0),
            failure: Mutex::new(None),
        })
    }

    /// Handle: asks the thread to end, and wakes it for good.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake.raise();
    }

    /// Handle: wakes the thread, which finds what there is to do.
    pub(super) fn wake(&self) {
        self.wake.raise();
    }

    /// Thread: awake. Before it looks at what it was woken for.
    pub(super) fn clear(&self) {
        self.wake.clear();
    }

    /// Thread: whether it is to end.
    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Thread: what it waits on beside its sockets.
    pub(super) fn fd(&self) -> RawFd {
        self.wake.fd()
    }

    /// Thread: why it ends, before [`ListenerFlags::end`].
    pub(super) fn fail(&self, error: Error) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }

    /// Thread: its last word.
    pub(super) fn end(&self) {
        self.alive.store(false, Ordering::Release);
    }

    /// Handle: whether the thread serves. When not, [`ListenerFlags::failure`] is final.
    pub(super) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// Handle: why the thread gave up.
    pub(super) fn failure(&self) -> Option<Error> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn count_request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
}
