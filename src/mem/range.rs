//! A stated range of memory.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use crate::proto::wire::MemoryKind;

/// A range of this process's memory that its owner keeps alive: see [`MemoryRange::new`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryRange {
    addr: u64,
    len: u64,
    kind: MemoryKind,
}

impl MemoryRange {
    /// States that `len` bytes at `addr` are memory of `kind`. Checked here: not null, not empty, no overflow.
    ///
    /// # Safety
    /// Registering the range with an agent lets remote processes and the agent's own thread read and write it.
    /// Until the deregistration has returned successfully (or, where the agent is shut down instead, until the
    /// shutdown has), the caller must keep the whole range mapped, and must not rely on Rust's aliasing rules for its
    /// contents: no `&mut` to it may be in use while a transfer could write it, no `&` while one could.
    pub unsafe fn new(addr: u64, len: u64, kind: MemoryKind) -> Result<Self> {
        if addr == 0 {
            return Err(Error::invalid("a null pointer was given as the address of a memory range"));
        }
        if len == 0 {
            return Err(Error::invalid(format!("the memory range at {addr:#x} is empty; expected at least one byte")));
        }
        if addr.checked_add(len).is_none() || isize::try_from(len).is_err() {
            return Err(Error::invalid(format!(
                "the memory range at {addr:#x} of {len} bytes does not fit the address space; addresses and lengths \
                 are in bytes"
            )));
        }
        Ok(MemoryRange { addr, len, kind })
    }

    /// Address of the first byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Length in bytes, at least 1.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never true: an empty range is refused.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address after the last byte.
    pub fn end(&self) -> u64 {
        self.addr.saturating_add(self.len)
    }

    /// The address of `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] when they leave the range.
    pub(super) fn slice(&self, offset: u64, len: u64) -> Result<u64> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.addr + offset),
            _ => Err(Error::new(ErrorKind::OutOfRange, format!("{len} bytes at offset {offset} leave {self}"))),
        }
    }

    /// Where the bytes live.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// Host memory of `len` bytes, all zero, that nobody else uses and that stays mapped until the process ends: for tests.
    #[cfg(test)]
    pub(crate) fn leaked(len: usize) -> Self {
        Self::leaked_with(vec![0; len])
    }

    /// Likewise, with these bytes.
    #[cfg(test)]
    pub(crate) fn leaked_with(bytes: Vec<u8>) -> Self {
        /// For a search for leaks, which takes what is named nowhere for one.
        static ALL: std::sync::Mutex<Vec<usize>> = std::sync::Mutex::new(Vec::new());
        let len = bytes.len() as u64;
        let addr = bytes.leak().as_mut_ptr().expose_provenance();
        ALL.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(addr);
        MemoryRange { addr: addr as u64, len, kind: MemoryKind::Host }
    }

    /// Reads a leaked range that nobody writes meanwhile.
    #[cfg(test)]
    pub(crate) fn leaked_bytes(&self) -> Vec<u8> {
        let start = std::ptr::with_exposed_provenance(self.addr as usize);
        // SAFETY: the bytes are initialized and stay mapped (see `leaked`); the caller sees to it that nobody writes them.
        unsafe { std::slice::from_raw_parts(start, self.len as usize) }.to_vec()
    }

    /// The same bytes, called memory of another kind: for tests of what is decided by that. They must not be moved.
    #[cfg(test)]
    pub(crate) fn described_as(self, kind: MemoryKind) -> Self {
        MemoryRange { kind, ..self }
    }

    /// True if the two ranges share a byte.
    pub fn overlaps(&self, other: &MemoryRange) -> bool {
        self.addr < other.end() && other.addr < self.end()
    }
}

impl fmt::Display for MemoryRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            MemoryKind::Host => write!(f, "host memory {:#x}+{}", self.addr, self.len),
            MemoryKind::Cuda { device } => write!(f, "memory of CUDA device {device} {:#x}+{}", self.addr, self.len),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn range(addr: u64, len: u64) -> Result<MemoryRange> {
        // SAFETY: nothing is registered, so nothing is accessed.
        unsafe { MemoryRange::new(addr, len, MemoryKind::Host) }
    }

    #[test]
    fn null_empty_and_overflowing_ranges_are_refused() {
        for (addr, len) in [(0, 8), (4096, 0), (u64::MAX - 4, 8), (4096, u64::MAX), (4096, 1 << 63)] {
            assert_eq!(range(addr, len).unwrap_err().kind(), ErrorKind::InvalidArgument, "{addr:#x}+{len}");
        }
        assert!(range(0, 8).unwrap_err().message().contains("null"));
    }

    #[test]
    fn overlap_is_symmetric_and_excludes_neighbours() {
        let a = range(1000, 100).unwrap();
        for (addr, len, expected) in
            [(900, 100, false), (900, 101, true), (1099, 1, true), (1100, 5, false), (1010, 3, true), (1, 9000, true)]
        {
            let b = range(addr, len).unwrap();
            assert_eq!((a.overlaps(&b), b.overlaps(&a)), (expected, expected), "{b}");
        }
    }
}
