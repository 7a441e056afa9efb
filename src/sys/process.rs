//! Memory of another process of this host, copied by the kernel: `process_vm_readv` and `process_vm_writev` with many
//! pieces a call.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::ended::has_ended;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{Direction, MemoryRange};
use crate::proto::wire::MemoryKind;

/// Pieces in one call besides the witness: Linux takes at most 1024 (UIO_MAXIOV, linux/uio.h).
pub const MAX_PIECES: usize = 1023;

/// Where a process is, as it tells its peers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessPlace {
    /// The host's boot id (`/proc/sys/kernel/random/boot_id`).
    host: String,
    /// Device and inode of its PID namespace.
    pid_namespace: (u64, u64),
    /// Its number there.
    pid: u32,
    /// Address of its [`Witness`].
    witness: u64,
}

/// Words in this process's memory that prove to a peer which process it is. A peer that reads them knows that it
/// reads this process, and that this process is the one that it talks to. One per connection; must live as long as
/// the peer may read.
///
/// They are a magic number, this process's incarnation, that inverted, two words that the peer drew at random for the
/// connection and has sent over it, and the peer's address as this process knows it, with its length. The peer knows its
/// own address. So a third process that passes on what two others say finds its own address here, or its answers go to
/// whom the address belongs.
#[derive(Debug)]
pub struct Witness(Box<[AtomicU64]>);

/// The words read with every copy: all up to the address.
type Words = [u64; 5];

/// The random numbers that a peer draws for a connection.
pub type Challenge = (u64, u64);

/// Begins a witness, so that no other bytes of any process are taken for one.
const MAGIC: u64 = 0x9d1c_6b02_4b56_4657;

impl Witness {
    /// For a process that is known by `incarnation`, and a peer with this address. No challenge is answered yet.
    pub fn new(incarnation: u64, peer: &[u8]) -> Witness {
        let words = words(incarnation, (0, 0)).into_iter().chain(bound(peer));
        Witness(words.map(AtomicU64::new).collect())
    }

    /// Answers the peer's challenge, readable by every process that may read this one's memory.
    pub fn answer(&self, challenge: Challenge) {
        if let [_, _, _, first, second, ..] = &*self.0 {
            first.store(challenge.0, Ordering::Release);
            second.store(challenge.1, Ordering::Release);
        }
    }

    /// Nobody takes it for a witness any more. Memory that is freed may keep what is in it.
    pub fn end(&self) {
        if let Some(first) = self.0.first() {
            first.store(0, Ordering::Release);
        }
    }

    /// The place to tell the peer, of this process, which is at `here`.
    pub fn place(&self, here: &ProcessPlace) -> ProcessPlace {
        ProcessPlace { witness: self.0.as_ptr().expose_provenance() as u64, ..here.clone() }
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.end();
    }
}

impl ProcessPlace {
    /// This process, without a witness. `None` where `/proc` does not say it. Takes several system calls, and stays the same.
    pub fn here() -> Option<ProcessPlace> {
        let (host, pid_namespace) = here()?;
        Some(ProcessPlace { host, pid_namespace, pid: std::process::id(), witness: 0 })
    }

    /// The place of another process, for tests of what follows from that.
    #[cfg(test)]
    pub(crate) fn with_pid(&self, pid: u32) -> ProcessPlace {
        ProcessPlace { pid, ..self.clone() }
    }

    /// True if the two are on one host.
    pub fn shares_host_with(&self, other: &ProcessPlace) -> bool {
        self.host == other.host
    }

    /// Its number, if the process at `other` knows it by the same.
    pub fn pid_beside(&self, other: &ProcessPlace) -> Option<u32> {
        (self.host == other.host && self.pid_namespace == other.pid_namespace).then_some(self.pid)
    }
}

fn words(incarnation: u64, challenge: Challenge) -> Words {
    [MAGIC, incarnation, !incarnation, challenge.0, challenge.1]
}

/// An address's length and bytes as words.
fn bound(address: &[u8]) -> impl Iterator<Item = u64> {
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    std::iter::once(address.len() as u64).chain(address.chunks(8).map(word))
}

/// This host and this PID namespace.
fn here() -> Option<(String, (u64, u64))> {
    let host = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().to_owned();
    let namespace = fs::metadata("/proc/self/ns/pid").ok()?;
    Some((host, (namespace.dev(), namespace.ino())))
}

/// Pieces to be copied by one call.
#[derive(Default)]
pub struct Batch {
    local: Vec<libc::iovec>,
    remote: Vec<libc::iovec>,
    pieces: usize,
    bytes: usize,
}

// SAFETY: the pointers are addresses, of registered ranges here, which any thread may use as long as the ranges are
// registered (`MemoryRange::new`), and of another process, which are never followed. Whoever lets a batch be copied keeps
// the ranges registered meanwhile, on whichever thread that is (`Neighbour::copy`).
unsafe impl Send for Batch {}

impl Batch {
    /// Forgets all pieces.
    pub fn clear(&mut self) {
        self.local.clear();
        self.remote.clear();
        self.pieces = 0;
        self.bytes = 0;
    }

    /// Pieces that were pushed. The kernel gets no more of them on either side.
    pub fn len(&self) -> usize {
        self.pieces
    }

    /// Tells whether there are none.
    pub fn is_empty(&self) -> bool {
        self.pieces == 0
    }

    /// Bytes in all pieces.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds `len` bytes at `offset` of a registered range here, and at address `remote` there. What follows the piece
    /// before it on one side becomes part of that there: the kernel looks each piece's pages up by itself.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] when they leave the range or the address space, [`ErrorKind::InvalidArgument`] for
    /// device memory, [`ErrorKind::Exhausted`] when there are [`MAX_PIECES`] already.
    pub fn push(&mut self, range: &MemoryRange, offset: u64, remote: u64, len: u64) -> Result<()> {
        if range.kind() != MemoryKind::Host {
            return Err(Error::invalid(format!("{range} is not host memory")));
        }
        if self.pieces >= MAX_PIECES {
            return Err(Error::new(ErrorKind::Exhausted, format!("a batch takes {MAX_PIECES} pieces")));
        }
        let inside = offset.checked_add(len).is_some_and(|end| end <= range.len());
        let (local, there, size) = (range.addr().checked_add(offset), usize::try_from(remote), usize::try_from(len));
        let (Some(local), Ok(there), Ok(size), true) = (local, there, size, inside) else {
            return Err(Error::new(ErrorKind::OutOfRange, format!("{len} bytes at offset {offset} leave {range}")));
        };
        self.bytes = self.bytes.checked_add(size).ok_or_else(|| {
            Error::new(ErrorKind::OutOfRange, "the pieces of a batch do not fit the address space together")
        })?;
        let local = ptr::with_exposed_provenance_mut(local as usize);
        join(&mut self.local, libc::iovec { iov_base: local, iov_len: size });
        // An address of the other process: never followed here.
        join(&mut self.remote, libc::iovec { iov_base: ptr::without_provenance_mut(there), iov_len: size });
        self.pieces += 1;
        Ok(())
    }
}

/// Adds a piece, to the last one if it follows it.
fn join(pieces: &mut Vec<libc::iovec>, piece: libc::iovec) {
    match pieces.last_mut() {
        Some(last) if last.iov_base.addr().checked_add(last.iov_len) == Some(piece.iov_base.addr()) => {
            // No more than all pieces together, which fit.
            last.iov_len += piece.iov_len;
        }
        _ => pieces.push(piece),
    }
}

/// True if all pages of an address range are in memory or swapped out: no access to it waits for anybody but the
/// kernel. `true` where that cannot be told.
///
/// # Errors
/// [`ErrorKind::PeerDied`] for a process that there is not, [`ErrorKind::Io`] for one that `/proc` hides from this user.
fn is_in_memory(pid: libc::pid_t, addresses: Range<usize>) -> Result<bool> {
    /// Bits of an entry, one per page (Documentation/admin-guide/mm/pagemap.rst in Linux).
    const PRESENT_OR_SWAPPED: u64 = 1 << 63 | 1 << 62;
    // SAFETY: asks for a number.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(1);
    let look = |map: File| {
        let mut entry = [0; 8];
        for page in addresses.start / page..addresses.end.div_ceil(page) {
            map.read_exact_at(&mut entry, page as u64 * 8)?;
            if u64::from_ne_bytes(entry) & PRESENT_OR_SWAPPED == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    };
    match File::open(format!("/proc/{pid}/pagemap")).and_then(look) {
        Ok(is_there) => Ok(is_there),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(match u32::try_from(pid) {
            Ok(number) if !has_ended(number) => Error::new(
                ErrorKind::Io,
                format!("/proc hides process {pid} (hidepid): run both as one user, or mount /proc without hidepid"),
            ),
            _ => Error::new(ErrorKind::PeerDied, format!("process {pid} is gone")),
        }),
        Err(error) => {
            log::debug!("the page map of process {pid}: {error}");
            Ok(true)
        }
    }
}

/// A process by its number and its agent's incarnation.
pub type Process = (libc::pid_t, u64);

/// A process of this host whose memory this one may copy.
#[derive(Debug)]
pub struct Neighbour {
    pid: libc::pid_t,
    witness: usize,
    words: Words,
}

impl Neighbour {
    /// Finds the process at `place`, if this one may read it. It is on this host, in the same PID namespace, the
    /// kernel lets this process read it, and its witness for the connection is the answer to `challenge` and names
    /// this process's address `own`.
    ///
    /// # Errors
    /// Where it is here but must not be read: what the kernel says, or that its witness is another's or has no answer (yet).
    pub fn find(place: &ProcessPlace, incarnation: u64, challenge: Challenge, own: &[u8]) -> Result<Option<Neighbour>> {
        if here() != Some((place.host.clone(), place.pid_namespace)) {
            return Ok(None);
        }
        let (Ok(pid), Ok(witness)) = (libc::pid_t::try_from(place.pid), usize::try_from(place.witness)) else {
            return Err(Error::corrupt(format!("process {} with a witness at {:#x}", place.pid, place.witness)));
        };
        let expected: Vec<u64> = words(incarnation, challenge).into_iter().chain(bound(own)).collect();
        // Whoever calls this must not wait for a page that does not come.
        if !is_in_memory(pid, witness..witness.saturating_add(size_of_val(&*expected)))? {
            return Err(Error::new(ErrorKind::Io, format!("the witness of process {pid} is not in its memory")));
        }
        let neighbour = Neighbour { pid, witness, words: words(incarnation, challenge) };
        let mut seen = vec![0; expected.len()];
        neighbour.read(&mut Batch::default(), &mut seen)?;
        if seen != expected {
            return Err(Error::new(
                ErrorKind::PeerDied,
                format!("process {pid} has not answered over this connection that it is the peer"),
            ));
        }
        Ok(Some(neighbour))
    }

    /// Which one it is.
    pub fn process(&self) -> Process {
        (self.pid, self.words[1])
    }

    /// Fails unless the process is still the one that it was.
    ///
    /// # Errors
    /// [`ErrorKind::PeerDied`] when it is not.
    pub fn check(&self) -> Result<()> {
        self.read_checked(&mut Batch::default())
    }

    /// As [`Neighbour::check`], for a caller that must not wait for a missing page.
    ///
    /// # Errors
    /// Likewise; [`ErrorKind::PeerDied`] also where the witness is not in the process's memory.
    pub fn check_at_once(&self) -> Result<()> {
        if !is_in_memory(self.pid, self.witness..self.witness.saturating_add(size_of::<Words>()))? {
            let text = format!("the witness of process {} is not in its memory any more", self.pid);
            return Err(Error::new(ErrorKind::PeerDied, text));
        }
        self.check()
    }

    /// Copies the pieces, all or with an error. The pieces may be used again; reading adds the witness meanwhile.
    ///
    /// Every read takes the witness along, and nothing is reported copied unless it is the expected one.
    ///
    /// The ranges' owners promised ([`MemoryRange::new`]) that they are mapped and may be read and written while they
    /// are registered; the caller keeps them registered during the call.
    ///
    /// # Errors
    /// [`ErrorKind::PeerDied`] when the process is gone, [`ErrorKind::Io`] when memory of it is not mapped (any more) or
    /// the kernel refuses otherwise. Some of the pieces may have been copied then.
    pub fn copy(&self, direction: Direction, batch: &mut Batch) -> Result<()> {
        if direction == Direction::Read {
            return self.read_checked(batch);
        }
        // A moment may pass between the two calls, but a process number comes again only after thousands of others.
        self.check()?;
        // SAFETY: the local pieces lie in registered ranges (see above), which are only read.
        let copied = unsafe {
            libc::process_vm_writev(
                self.pid,
                batch.local.as_ptr(),
                batch.local.len() as libc::c_ulong,
                batch.remote.as_ptr(),
                batch.remote.len() as libc::c_ulong,
                0,
            )
        };
        self.judge(copied, batch.bytes)
    }

    fn read_checked(&self, batch: &mut Batch) -> Result<()> {
        let mut seen: Words = [0; 5];
        self.read(batch, &mut seen)?;
        if seen != self.words {
            return Err(self.gone());
        }
        Ok(())
    }

    /// Reads the pieces, and as many words of the witness as `seen` has.
    fn read(&self, batch: &mut Batch, seen: &mut [u64]) -> Result<()> {
        let size = size_of_val(seen);
        batch.local.push(libc::iovec { iov_base: seen.as_mut_ptr().cast(), iov_len: size });
        batch.remote.push(libc::iovec { iov_base: ptr::without_provenance_mut(self.witness), iov_len: size });
        // SAFETY: the local pieces lie in registered ranges (see above), which may be written, and in `seen`.
        let copied = unsafe {
            libc::process_vm_readv(
                self.pid,
                batch.local.as_ptr(),
                batch.local.len() as libc::c_ulong,
                batch.remote.as_ptr(),
                batch.remote.len() as libc::c_ulong,
                0,
            )
        };
        batch.local.pop();
        batch.remote.pop();
        self.judge(copied, batch.bytes.saturating_add(size))
    }

    fn judge(&self, copied: isize, expected: usize) -> Result<()> {
        if usize::try_from(copied) == Ok(expected) {
            return Ok(());
        }
        let not_mapped = |copied: usize| {
            Error::new(
                ErrorKind::Io,
                format!(
                    "{copied} of {expected} bytes were copied: memory of process {} is not mapped; did its owner \
                     deregister or free it?",
                    self.pid
                ),
            )
        };
        if let Ok(copied) = usize::try_from(copied) {
            return Err(not_mapped(copied));
        }
        let error = io::Error::last_os_error();
        Err(match error.raw_os_error() {
            Some(libc::ESRCH) => self.gone(),
            Some(libc::EFAULT) => not_mapped(0),
            _ => Error::new(ErrorKind::Io, format!("copying memory of process {}: {error}", self.pid)),
        })
    }

    fn gone(&self) -> Error {
        Error::new(ErrorKind::PeerDied, format!("process {} has ended", self.pid))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;
    use crate::sys::ended::tests::become_nobody_with_hidepid;

    fn range(memory: &mut [u8]) -> MemoryRange {
        let addr = memory.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the tests keep the memory and look at it only between copies.
        unsafe { MemoryRange::new(addr, memory.len() as u64, MemoryKind::Host) }.unwrap()
    }

    const CHALLENGE: Challenge = (3, 4);
    const ADDRESS: &[u8] = b"an address";

    /// This process.
    fn neighbour() -> (Witness, Neighbour) {
        let witness = Witness::new(7, ADDRESS);
        witness.answer(CHALLENGE);
        let neighbour =
            Neighbour::find(&witness.place(&ProcessPlace::here().unwrap()), 7, CHALLENGE, ADDRESS).unwrap().unwrap();
        (witness, neighbour)
    }

    #[test]
    fn a_witness_is_of_one_process_one_connection_and_one_address() {
        let witness = Witness::new(7, ADDRESS);
        let place = witness.place(&ProcessPlace::here().unwrap());
        let find = |incarnation, challenge, own| Neighbour::find(&place, incarnation, challenge, own);
        let refused = |incarnation, challenge, own| {
            let error = find(incarnation, challenge, own).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PeerDied, "{error}");
        };
        refused(7, CHALLENGE, ADDRESS);
        witness.answer(CHALLENGE);
        assert!(find(7, CHALLENGE, ADDRESS).unwrap().is_some());
        refused(8, CHALLENGE, ADDRESS);
        refused(7, (3, 5), ADDRESS);
        refused(7, (4, 4), ADDRESS);
        refused(7, CHALLENGE, b"an addresS");
        refused(7, CHALLENGE, b"an addres");
        let neighbour = find(7, CHALLENGE, ADDRESS).unwrap().unwrap();
        witness.answer((9, 9));
        assert_eq!(neighbour.check().unwrap_err().kind(), ErrorKind::PeerDied);
        witness.answer(CHALLENGE);
        neighbour.check().unwrap();
        witness.end();
        assert_eq!(neighbour.check().unwrap_err().kind(), ErrorKind::PeerDied);
    }

    #[test]
    fn a_witness_whose_page_is_not_in_memory_is_not_looked_at() {
        // SAFETY: a new mapping, which nothing uses.
        let untouched = unsafe {
            let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            libc::mmap(ptr::null_mut(), 4096, access, flags, -1, 0)
        };
        assert_ne!(untouched, libc::MAP_FAILED);
        let place = ProcessPlace { witness: untouched.addr() as u64, ..ProcessPlace::here().unwrap() };
        let error = Neighbour::find(&place, 7, CHALLENGE, ADDRESS).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        assert!(error.message().contains("not in its memory"), "{error}");
    }

    #[test]
    fn pieces_are_copied_both_ways_within_this_process() {
        let (_witness, neighbour) = neighbour();
        let mut there: Vec<u8> = (0..200).collect();
        let mut here = vec![255u8; 100];
        let (from, to) = (range(&mut there), range(&mut here));
        let mut batch = Batch::default();
        batch.push(&to, 10, from.addr() + 50, 5).unwrap();
        batch.push(&to, 0, from.addr() + 199, 1).unwrap();
        neighbour.copy(Direction::Read, &mut batch).unwrap();
        assert_eq!((&here[10..16], here[0], here[1]), (&[50, 51, 52, 53, 54, 255][..], 199, 255));
        assert_eq!((batch.len(), batch.bytes()), (2, 6));
        batch.clear();
        here[98..].copy_from_slice(&[1, 2]);
        batch.push(&to, 98, from.addr() + 3, 2).unwrap();
        neighbour.copy(Direction::Write, &mut batch).unwrap();
        assert_eq!(&there[2..6], &[2, 1, 2, 5]);
    }

    #[test]
    fn pieces_that_follow_each_other_on_one_side_are_one_there() {
        let (_witness, neighbour) = neighbour();
        let mut there: Vec<u8> = (0..200).collect();
        let mut here = vec![255u8; 100];
        let (from, to) = (range(&mut there), range(&mut here));
        let mut batch = Batch::default();
        for (offset, remote) in [(40, 100), (20, 105), (0, 110), (5, 120), (10, 125)] {
            batch.push(&to, offset, from.addr() + remote, 5).unwrap();
        }
        assert_eq!((batch.local.len(), batch.remote.len(), batch.len(), batch.bytes()), (3, 2, 5, 25));
        neighbour.copy(Direction::Read, &mut batch).unwrap();
        let expected = [(40, 100), (20, 105), (0, 110), (5, 120), (10, 125)];
        for (offset, remote) in expected {
            assert_eq!(here[offset..offset + 5], (remote..remote + 5).collect::<Vec<u8>>());
        }
        assert_eq!(here.iter().filter(|byte| **byte == 255).count(), 75, "nothing else was written");
    }

    #[test]
    fn what_leaves_its_range_or_is_too_much_is_refused() {
        let mut memory = vec![0u8; 100];
        let range = range(&mut memory);
        let mut batch = Batch::default();
        for (offset, len) in [(98, 3), (100, 1), (u64::MAX, 2), (0, 101)] {
            assert_eq!(batch.push(&range, offset, 4096, len).unwrap_err().kind(), ErrorKind::OutOfRange);
        }
        (0..MAX_PIECES).for_each(|_| batch.push(&range, 0, 4096, 1).unwrap());
        assert_eq!(batch.push(&range, 0, 4096, 1).unwrap_err().kind(), ErrorKind::Exhausted);
    }

    #[test]
    fn a_dead_process_another_host_and_unmapped_memory_are_noticed() {
        let (witness, neighbour) = neighbour();
        let place = witness.place(&ProcessPlace::here().unwrap());
        let find = |place| Neighbour::find(place, 7, CHALLENGE, ADDRESS);
        let elsewhere = ProcessPlace { host: "another".to_owned(), ..place.clone() };
        assert!(find(&elsewhere).unwrap().is_none());
        let contained = ProcessPlace { pid_namespace: (0, 0), ..place.clone() };
        assert!(find(&contained).unwrap().is_none());
        // Linux gives no process a number above 2^22 (PID_MAX_LIMIT).
        let nobody = ProcessPlace { pid: (1 << 22) + 1, ..place.clone() };
        assert_eq!(find(&nobody).unwrap_err().kind(), ErrorKind::PeerDied);

        let mut memory = vec![0u8; 100];
        let mut batch = Batch::default();
        // The first page of the address space is never mapped for ordinary processes (vm.mmap_min_addr).
        batch.push(&range(&mut memory), 0, 16, 8).unwrap();
        assert_eq!(neighbour.copy(Direction::Read, &mut batch).unwrap_err().kind(), ErrorKind::Io);
        assert_eq!(neighbour.copy(Direction::Write, &mut batch).unwrap_err().kind(), ErrorKind::Io);
    }

    #[test]
    fn a_hidden_process_has_not_ended() {
        let mut other = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = other.id();
        let seen = std::thread::spawn(move || {
            become_nobody_with_hidepid()?;
            let is_hidden = !std::path::Path::new(&format!("/proc/{pid}")).exists();
            let place = ProcessPlace { pid, witness: 4096, ..ProcessPlace::here().unwrap() };
            Ok::<_, io::Error>((is_hidden, has_ended(pid), Neighbour::find(&place, 7, CHALLENGE, ADDRESS)))
        });
        let seen = seen.join().unwrap();
        other.kill().unwrap();
        other.wait().unwrap();
        match seen {
            Err(error) => eprintln!("SKIPPED: /proc cannot be mounted here: {error}"),
            Ok((is_hidden, has_ended, found)) => {
                assert_eq!((is_hidden, has_ended), (true, false));
                let error = found.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Io, "{error}");
                assert!(error.message().contains("hidepid"), "{error}");
            }
        }
    }
}
