//! News of a descriptor, as opposed to its state.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::error::{Error, ErrorKind, Result};

/// A descriptor that is readable once for each change of another one.
///
/// While a TCP connection of UCX's waits for the peer's answer, UCX's event fd stays readable because the socket can be
/// written to, though there is nothing to write: who sleeps on it does not sleep, until the peer answers. Through this,
/// only what is new wakes.
#[derive(Debug)]
pub(crate) struct EdgeWait(OwnedFd);

impl EdgeWait {
    /// Watches `source`, which must stay open as long.
    pub(crate) fn of(source: impl AsFd) -> Result<Self> {
        let failed = |e| {
            Error::new(ErrorKind::Io, format!("making an epoll descriptor: {e}; is the limit of open files too low?"))
        };
        let descriptor = epoll::create(CreateFlags::CLOEXEC).map_err(failed)?;
        epoll::add(&descriptor, source, EventData::new_u64(0), EventFlags::IN | EventFlags::ET).map_err(failed)?;
        Ok(EdgeWait(descriptor))
    }

    /// What to poll for reading.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Forgets the changes so far.
    pub(crate) fn clear(&self) {
        let mut events = Vec::with_capacity(1);
        // Nothing to take is no matter, nor is a signal: then it is readable once more than it had to be.
        let _ = epoll::wait(&self.0, spare_capacity(&mut events), Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    fn is_readable(edges: &EdgeWait) -> bool {
        let mut items = [PollFd::new(&edges.0, PollFlags::IN)];
        poll(&mut items, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    }

    /// As UCX has it: sockets in an epoll descriptor, here one that can be written to all the time.
    #[test]
    fn what_stays_as_it_was_wakes_once_and_what_is_new_wakes_again() {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        let inner = epoll::create(CreateFlags::CLOEXEC).unwrap();
        epoll::add(&inner, &near, EventData::new_u64(1), EventFlags::IN | EventFlags::OUT).unwrap();
        let edges = EdgeWait::of(&inner).unwrap();
        assert!(is_readable(&edges), "what was there before counts");
        edges.clear();
        assert!(!is_readable(&edges));
        for _ in 0..3 {
            far.write_all(b"news").unwrap();
            assert!(is_readable(&edges));
            edges.clear();
            assert!(!is_readable(&edges), "it has not been read, and is no news");
        }
        near.read_exact(&mut [0; 12]).unwrap();
        edges.clear();
        far.write_all(b"x").unwrap();
        assert!(is_readable(&edges));
    }
}
