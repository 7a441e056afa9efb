//! Bytes of registered host memory to and from a socket, without a copy in between: pages are lent to the socket
//! (`vmsplice`, `splice`), and what arrives is put in place by one call for many places (`readv`).

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use super::MemoryRange;
use crate::error::{Error, ErrorKind, Result};
use crate::proto::wire::MemoryKind;

/// Stretches that one system call takes (UIO_MAXIOV, linux/uio.h).
pub const MAX_STRETCHES: usize = 1024;
/// What a process may make a pipe hold without privileges (`/proc/sys/fs/pipe-max-size`, by default); less will do.
const PIPE_BYTES: usize = 1 << 20;

/// Consecutive bytes of a registered range of host memory.
#[derive(Debug, Clone, Copy)]
pub struct Stretch {
    addr: u64,
    len: usize,
}

impl Stretch {
    /// `len` bytes at `offset` of a registered range.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] when they leave the range, [`ErrorKind::InvalidArgument`] for memory of a device.
    pub fn new(range: &MemoryRange, offset: u64, len: u64) -> Result<Self> {
        if range.kind() != MemoryKind::Host {
            return Err(Error::invalid(format!("{range} cannot be given to a socket; expected host memory")));
        }
        match offset.checked_add(len) {
            // As long as the range, whose length fits.
            Some(end) if end <= range.len() => Ok(Stretch { addr: range.addr() + offset, len: len as usize }),
            _ => Err(Error::new(ErrorKind::OutOfRange, format!("{len} bytes at offset {offset} leave {range}"))),
        }
    }
}

/// The first of `stretches`, as many as one system call takes.
fn vectors(stretches: &[Stretch]) -> Vec<libc::iovec> {
    let vector = |stretch: &Stretch| libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(stretch.addr as usize),
        iov_len: stretch.len,
    };
    stretches.iter().take(MAX_STRETCHES).map(vector).collect()
}

/// A way for pages into sockets. Empty between calls.
#[derive(Debug)]
pub struct PagePipe {
    reader: OwnedFd,
    writer: OwnedFd,
    /// Where pages go that a socket had no room for.
    nowhere: OwnedFd,
}

impl PagePipe {
    /// A pipe of three descriptors.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn new() -> std::io::Result<Self> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // A user who has many pipes is refused; then each call takes fewer pages.
        let _ = fcntl_setpipe_size(&writer, PIPE_BYTES);
        let nowhere = std::fs::OpenOptions::new().write(true).open("/dev/null")?.into();
        Ok(PagePipe { reader, writer, nowhere })
    }

    /// Lends the pages of the first of `stretches` to `socket`, as many as the pipe holds and the socket takes. The socket
    /// sends what is in them when it sends, and frees them when the other side has them: until then whoever writes to the
    /// memory changes what arrives. Never blocks if the socket does not. Returns the bytes that the socket has taken, 0 when it
    /// is full.
    ///
    /// # Errors
    /// [`Refusal::Pages`] where the kernel lends no such pages and nothing was sent, [`Refusal::Socket`] for a broken
    /// connection.
    pub fn send(&self, socket: impl AsFd, stretches: &[Stretch]) -> std::result::Result<usize, Refusal> {
        let io = vectors(stretches);
        // SAFETY: whoever made the ranges promised that they are mapped while they are registered, and the kernel only reads
        // them; the list has at most as many entries as the kernel takes, which fits the type. What is written to the memory
        // while the socket has its pages is sent or not, which the caller was told.
        let held = unsafe { libc::vmsplice(self.writer.as_raw_fd(), io.as_ptr(), io.len(), libc::SPLICE_F_NONBLOCK) };
        let held = usize::try_from(held).map_err(|_| Refusal::Pages(std::io::Error::last_os_error()))?;
        let mut sent = 0;
        while sent < held {
            match splice(&self.reader, None, &socket, None, held - sent, SpliceFlags::MOVE | SpliceFlags::NONBLOCK) {
                Ok(0) => return self.clear(Err(Refusal::Socket(Errno::PIPE.into()))),
                Ok(bytes) => sent += bytes,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return self.clear(Ok(sent)),
                Err(error) if sent == 0 && error == Errno::INVAL => {
                    return self.clear(Err(Refusal::Pages(error.into())));
                }
                Err(error) => return self.clear(Err(Refusal::Socket(error.into()))),
            }
        }
        Ok(sent)
    }

    /// Gives back the pages that the pipe still holds.
    fn clear<T>(&self, result: T) -> T {
        loop {
            match splice(&self.reader, None, &self.nowhere, None, PIPE_BYTES, SpliceFlags::NONBLOCK) {
                Ok(0) | Err(Errno::AGAIN) => return result,
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    // The next pages would follow these.
                    log::error!("pages cannot be taken out of a pipe: {error}");
                    return result;
                }
            }
        }
    }
}

/// Why pages were not sent.
#[derive(Debug)]
pub enum Refusal {
    /// The kernel does not lend them: memory of a driver, or a filter of system calls.
    Pages(std::io::Error),
    /// The connection is broken.
    Socket(std::io::Error),
}

/// Puts what has arrived at `socket` in place: from the first of `stretches` on. Returns the number of bytes, 0 at the end of
/// the connection. Never blocks if the socket does not.
///
/// # Errors
/// What the kernel says, such as that nothing has arrived.
pub fn receive(socket: impl AsFd, stretches: &[Stretch]) -> std::io::Result<usize> {
    let io = vectors(stretches);
    // SAFETY: whoever made the ranges promised that they may be written while they are registered, and that no reference to
    // them is in use meanwhile; the list has at most as many entries as the kernel takes, which fits the type.
    let got = unsafe { libc::readv(socket.as_fd().as_raw_fd(), io.as_ptr(), io.len() as libc::c_int) };
    usize::try_from(got).map_err(|_| std::io::Error::last_os_error())
}
