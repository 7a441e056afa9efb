//! Types that the modules shared by threads are made of. `loom/` builds those very files with a module of this name that has
//! loom's types, and tries every order in which threads can run.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize};
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock};

use crate::error::{Error, ErrorKind, Result};

/// An eventfd: readable from the first [`Signal::raise`] until [`Signal::clear`].
#[derive(Debug)]
pub(crate) struct Signal(OwnedFd);

impl Signal {
    pub(crate) fn new() -> Result<Signal> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| {
            Error::new(ErrorKind::Io, format!("making an eventfd: {e}; is the open files limit reached?"))
        })?;
        Ok(Signal(fd))
    }

    pub(crate) fn raise(&self) {
        // The only error of this write is a full counter, which is readable all the same.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn clear(&self) {
        let mut count = [0u8; 8];
        // Nothing to read is an error that says just that.
        let _ = rustix::io::read(&self.0, &mut count);
    }

    /// The descriptor that a loop waits on.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
