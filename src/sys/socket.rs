//! Bytes of registered host memory to and from a socket, without a copy in between: pages are lent to the socket
//! (`vmsplice`, `splice`) or their bytes copied into it from many places by one call (`sendmsg`), and what arrives is put in
//! place by one call for many places (`readv`).

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::io::ErrorKind as IoErrorKind;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use crate::error::{Error, ErrorKind, Result};
use crate::mem::MemoryRange;
use crate::proto::wire::MemoryKind;

/// Stretches that one system call takes (UIO_MAXIOV, linux/uio.h).
pub const MAX_STRETCHES: usize = 1024;
/// What a pipe holds: a quarter of what a process may have without privileges (`/proc/sys/fs/pipe-max-size`, by default), and of
/// the caches next to a processor.
const PIPE_BYTES: usize = 256 << 10;
/// Bytes that a processor fetches at a time.
#[cfg(target_arch = "x86_64")]
const CACHE_LINE: usize = 64;

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

/// Consecutive bytes, many times: what is left to send, or to receive.
#[derive(Debug, Default)]
pub struct Stretches {
    all: Vec<Stretch>,
    /// The first one of which anything is left.
    first: usize,
}

impl Stretches {
    /// All of `all` is left. Neighbours become one.
    pub fn new(mut all: Vec<Stretch>) -> Self {
        all.dedup_by(|next, before| {
            let follows = before.addr + before.len as u64 == next.addr;
            if follows {
                before.len += next.len;
            }
            follows
        });
        let mut stretches = Stretches { all, first: 0 };
        // So that nothing is left where all are empty.
        stretches.advance(0);
        stretches
    }

    /// What is left.
    pub fn left(&self) -> &[Stretch] {
        self.all.get(self.first..).unwrap_or_default()
    }

    /// How many bytes are left.
    pub fn len(&self) -> u64 {
        self.left().iter().map(|stretch| stretch.len as u64).sum()
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.left().is_empty()
    }

    /// The first `len` bytes of what is left are done.
    pub fn advance(&mut self, mut len: usize) {
        while let Some(stretch) = self.all.get_mut(self.first) {
            if len < stretch.len {
                stretch.addr += len as u64;
                stretch.len -= len;
                return;
            }
            len -= stretch.len;
            self.first += 1;
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

/// Has the calling thread's processor fetch the first [`PIPE_BYTES`] of `stretches` into its caches, and does not wait for it.
/// Does nothing on other processors than those of x86-64.
fn warm(stretches: &[Stretch]) {
    #[cfg(target_arch = "x86_64")]
    {
        let mut room = PIPE_BYTES;
        for stretch in stretches {
            let len = stretch.len.min(room);
            room -= len;
            let first = std::ptr::with_exposed_provenance::<i8>(stretch.addr as usize);
            for line in (0..len).step_by(CACHE_LINE) {
                // SAFETY: a prefetch neither faults nor reads anything that the program sees, whatever the address; all x86-64
                // processors have it.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(first.wrapping_add(line)) };
            }
            if room == 0 {
                break;
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = stretches;
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
    /// With `warm_up` their bytes are fetched into the caches first. This processor does not touch what it lends, and one of this
    /// host that copies it out of the pages would wait for the memory by itself.
    ///
    /// A broken connection raises `SIGPIPE`, which the calling thread must block: threads of
    /// [`spawn`](super::thread::spawn) do.
    ///
    /// # Errors
    /// [`Refusal::Pages`] where the kernel lends no such pages and nothing was sent, [`Refusal::Socket`] for a broken
    /// connection, [`Refusal::Pipe`] where pages are left in the pipe, which must not be used again then.
    pub fn send(&self, socket: impl AsFd, stretches: &[Stretch], warm_up: bool) -> std::result::Result<usize, Refusal> {
        if warm_up {
            warm(stretches);
        }
        let io = vectors(stretches);
        // SAFETY: whoever made the ranges promised that they are mapped while they are registered, and the kernel only reads
        // them; the list has at most as many entries as the kernel takes, which fits the type. What is written to the memory
        // while the socket has its pages is sent or not, which the caller was told.
        let held = unsafe { libc::vmsplice(self.writer.as_raw_fd(), io.as_ptr(), io.len(), libc::SPLICE_F_NONBLOCK) };
        let held = usize::try_from(held).map_err(|_| Refusal::Pages(std::io::Error::last_os_error()))?;
        let mut sent = 0;
        while sent < held {
            match splice(&self.reader, None, &socket, None, held - sent, SpliceFlags::MOVE | SpliceFlags::NONBLOCK) {
                Ok(0) => return self.clear().and(Err(Refusal::Socket(Errno::PIPE.into()))),
                Ok(bytes) => sent += bytes,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return self.clear().map(|()| sent),
                Err(error) if sent == 0 && error == Errno::INVAL => {
                    return self.clear().and(Err(Refusal::Pages(error.into())));
                }
                Err(error) => return self.clear().and(Err(Refusal::Socket(error.into()))),
            }
        }
        Ok(sent)
    }

    /// Gives back the pages that the pipe still holds. On an error some are left, and the next ones would follow them.
    fn clear(&self) -> std::result::Result<(), Refusal> {
        loop {
            match splice(&self.reader, None, &self.nowhere, None, PIPE_BYTES, SpliceFlags::NONBLOCK) {
                Ok(0) | Err(Errno::AGAIN) => return Ok(()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Refusal::Pipe(error.into())),
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
    /// The pipe cannot be emptied.
    Pipe(std::io::Error),
}

/// Closes a socket that may have pages of this process, so that the kernel forgets what it has not sent: an ordinary close
/// leaves it sending what the pages hold later. The other side reads what has arrived there and then the end of a broken
/// connection.
pub fn discard(socket: TcpStream) {
    // The kernel refuses this of no TCP socket.
    let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
}

/// From now on `socket` is reported as readable only when so many bytes are there, or its end (`SO_RCVLOWAT`, socket(7));
/// what is there can be read at any time. The kernel takes half of the socket's buffer at most.
///
/// # Errors
/// What the kernel says.
pub fn set_least_readable(socket: impl AsFd, bytes: u64) -> std::io::Result<()> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option takes an int, which lives until the call returns.
    let set = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const bytes).cast(),
            len,
        )
    };
    if set == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Whether the other side has not discarded the connection so far. On one host, what has arrived may still be the other
/// process's pages: what was read of them before this says yes, they held while they were lent.
///
/// # Errors
/// That it has, or how else the connection broke.
pub fn check_kept(socket: &TcpStream) -> std::io::Result<()> {
    socket.take_error()?.map_or(Ok(()), Err)
}

/// Copies the first of `stretches` into `socket`, as much as it takes. Never blocks if the socket does not. Returns the number
/// of bytes, 0 when it is full.
///
/// # Errors
/// What the kernel says: of a broken connection, or of memory that is not there.
pub fn send(socket: impl AsFd, stretches: &[Stretch]) -> std::io::Result<usize> {
    let mut io = vectors(stretches);
    // SAFETY: a message without anything is all zeros.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = io.as_mut_ptr();
    message.msg_iovlen = io.len() as _;
    // SAFETY: whoever made the ranges promised that they are mapped while they are registered, and the kernel only reads
    // them; the message and its list live until the call returns.
    let sent = unsafe { libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    match usize::try_from(sent).map_err(|_| std::io::Error::last_os_error()) {
        Err(error) if matches!(error.kind(), IoErrorKind::WouldBlock | IoErrorKind::Interrupted) => Ok(0),
        sent => sent,
    }
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

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    /// Bytes that differ from place to place, and their range.
    fn memory(len: usize, seed: usize) -> (Vec<u8>, MemoryRange) {
        let mut bytes: Vec<u8> = (0..len).map(|at| ((at + seed) % 251) as u8).collect();
        let addr = bytes.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the bytes outlive the range in every test, and are not used while they are sent or received.
        let range = unsafe { MemoryRange::new(addr, len as u64, MemoryKind::Host) }.unwrap();
        (bytes, range)
    }

    fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        near.set_nonblocking(true).unwrap();
        (near, far)
    }

    #[test]
    fn what_was_moved_is_left_out_within_and_across_stretches() {
        let left_after = |steps: &[usize]| {
            let all = [(0, 10), (20, 5), (30, 0), (40, 8)].map(|(addr, len)| Stretch { addr, len });
            let mut stretches = Stretches::new(all.to_vec());
            steps.iter().for_each(|step| stretches.advance(*step));
            stretches.left().iter().map(|left| (left.addr, left.len)).collect::<Vec<_>>()
        };
        assert_eq!(left_after(&[]), [(0, 10), (20, 5), (30, 0), (40, 8)]);
        assert_eq!(left_after(&[4, 5]), [(9, 1), (20, 5), (30, 0), (40, 8)]);
        assert_eq!(left_after(&[10]), [(20, 5), (30, 0), (40, 8)]);
        assert_eq!(left_after(&[9, 6]), [(40, 8)]);
        assert_eq!(left_after(&[10, 7]), [(42, 6)]);
        assert!(left_after(&[23]).is_empty() && left_after(&[22, usize::MAX]).is_empty());
        assert!(Stretches::new(vec![Stretch { addr: 0, len: 0 }]).left().is_empty());
        let neighbours = [(40, 5), (45, 5), (50, 1), (52, 1), (40, 5)].map(|(addr, len)| Stretch { addr, len });
        let joined = Stretches::new(neighbours.to_vec());
        let joined: Vec<_> = joined.left().iter().map(|left| (left.addr, left.len)).collect();
        assert_eq!(joined, [(40, 11), (52, 1), (40, 5)]);
    }

    #[test]
    fn stretches_stay_within_their_range() {
        let (_bytes, range) = memory(100, 0);
        assert!(Stretch::new(&range, 90, 10).is_ok());
        for (offset, len) in [(91, 10), (u64::MAX, 2), (0, 101)] {
            assert_eq!(Stretch::new(&range, offset, len).unwrap_err().kind(), ErrorKind::OutOfRange);
        }
        // SAFETY: it is only asked for its kind.
        let device = unsafe { MemoryRange::new(4096, 8, MemoryKind::Cuda { device: 0 }) }.unwrap();
        assert_eq!(Stretch::new(&device, 0, 8).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn scattered_pages_arrive_in_scattered_places_whatever_the_socket_takes_at_a_time() {
        const PIECE: usize = 3001;
        const PIECES: usize = 4000;
        let (bytes, range) = memory(PIECE * PIECES, 0);
        let (arrived, target) = memory(PIECE * PIECES, 77);
        let order: Vec<u64> = (0..PIECES as u64).map(|at| at * 1237 % PIECES as u64).collect();
        let at = |range: &MemoryRange, piece: u64| Stretch::new(range, piece * PIECE as u64, PIECE as u64).unwrap();
        let mut from = Stretches::new(order.iter().map(|piece| at(&range, *piece)).collect());
        let mut to = Stretches::new(order.iter().rev().map(|piece| at(&target, *piece)).collect());
        let (near, far) = connected();
        far.set_nonblocking(true).unwrap();
        let pipe = PagePipe::new().unwrap();
        let (mut received, mut full, mut turn) = (0, 0, 0);
        while received < bytes.len() {
            if !from.left().is_empty() {
                // By turns, as the bytes of one connection may be lent and copied.
                turn += 1;
                let sent = match turn % 2 {
                    0 => pipe.send(&near, from.left(), true).unwrap(),
                    _ => send(&near, from.left()).unwrap(),
                };
                from.advance(sent);
                match sent {
                    0 => full += 1,
                    // As long as there is room, so that it comes to be full.
                    _ => continue,
                }
            }
            match receive(&far, to.left()) {
                Ok(got) => {
                    received += got;
                    to.advance(got);
                }
                Err(error) => assert_eq!(error.kind(), IoErrorKind::WouldBlock),
            }
        }
        assert!(to.left().is_empty());
        assert!(full > 0, "the socket was full at times");
        for (from, to) in order.iter().zip(order.iter().rev()) {
            let (from, to) = (*from as usize * PIECE, *to as usize * PIECE);
            assert_eq!(arrived[to..to + PIECE], bytes[from..from + PIECE], "{from} to {to}");
        }
        // Nothing is left that would stand before the next bytes.
        assert_eq!(pipe.send(&near, &[at(&range, 5)], false).unwrap(), PIECE);
        drop(near);
        let mut rest = Vec::new();
        far.set_nonblocking(false).unwrap();
        (&far).read_to_end(&mut rest).unwrap();
        assert_eq!(rest, bytes[5 * PIECE..6 * PIECE]);
    }

    #[test]
    fn a_pipe_that_cannot_be_emptied_is_not_one_to_go_on_with() {
        let (bytes, range) = memory(16 << 20, 0);
        let mut all = Stretches::new(vec![Stretch::new(&range, 0, bytes.len() as u64).unwrap()]);
        let (near, _far) = connected();
        let readable = std::fs::OpenOptions::new().read(true).open("/dev/null").unwrap();
        let pipe = PagePipe { nowhere: readable.into(), ..PagePipe::new().unwrap() };
        // Until the socket has room for only a part of what the pipe holds.
        let refused = (0..10_000).find_map(|_| match pipe.send(&near, all.left(), false) {
            Ok(sent) => {
                all.advance(sent);
                None
            }
            Err(refusal) => Some(refusal),
        });
        assert!(matches!(refused, Some(Refusal::Pipe(_))), "{refused:?}");
    }

    #[test]
    fn nothing_is_sent_any_more_of_a_discarded_socket_and_the_other_side_knows() {
        let (bytes, range) = memory(16 << 20, 0);
        let mut all = Stretches::new(vec![Stretch::new(&range, 0, bytes.len() as u64).unwrap()]);
        let (near, far) = connected();
        let pipe = PagePipe::new().unwrap();
        let mut sent = 0;
        loop {
            match pipe.send(&near, all.left(), false).unwrap() {
                0 => break,
                some => {
                    sent += some;
                    all.advance(some);
                }
            }
        }
        let mut first = [0; 4096];
        (&far).read_exact(&mut first).unwrap();
        check_kept(&far).unwrap();
        discard(near);
        // What has arrived can be read, and is not taken for what was lent.
        let mut rest = Vec::new();
        far.set_nonblocking(true).unwrap();
        (&far).read_exact(&mut first).unwrap();
        assert_eq!(check_kept(&far).unwrap_err().kind(), IoErrorKind::ConnectionReset);
        let _ = (&far).read_to_end(&mut rest);
        assert!(rest.len() + 2 * first.len() < sent, "{} of {sent} bytes arrived", rest.len());
    }

    #[test]
    fn memory_that_is_gone_and_connections_that_are_broken_are_told_apart() {
        let (near, far) = connected();
        let pipe = PagePipe::new().unwrap();
        // Page 1 of the address space is never mapped.
        let gone = Stretch { addr: 4096, len: 4096 };
        assert!(matches!(pipe.send(&near, &[gone], true), Err(Refusal::Pages(_))));
        let (bytes, range) = memory(100_000, 0);
        let all = Stretch::new(&range, 0, 100_000).unwrap();
        drop(far);
        let broken = (0..1000).find_map(|_| pipe.send(&near, &[all], false).err());
        assert!(matches!(broken, Some(Refusal::Socket(_))), "{broken:?}");
        // The pipe is as good as new.
        let (near, far) = connected();
        assert!(pipe.send(&near, &[all], false).unwrap() > 0);
        let mut first = [0; 100];
        (&far).read_exact(&mut first).unwrap();
        assert_eq!(first, bytes[..100]);
    }
}
