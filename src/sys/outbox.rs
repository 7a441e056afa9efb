//! Memory of a caller's in which reports are left for it, so that it needs no call to see whether there is one, nor to take it.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::error::{Error, Result};

/// A piece of the caller's memory: two flags, a length, and the report behind them.
///
/// Byte 0 is 1 while a report waits; this side sets it, and the reader clears it when it has read. Byte 1, this side's, says
/// that there is more, to be asked for by a call. Bytes 8 to 15 are the report's length, in the machine's order.
#[derive(Debug)]
pub struct Outbox {
    memory: *mut u8,
    capacity: usize,
}

// SAFETY: `new` is promised that the memory may be written from any thread, and `&mut self` is asked for all writes but those of
// the two flags, which are atomic.
unsafe impl Send for Outbox {}

impl Outbox {
    /// Flags and length. An outbox of this size takes no report, and its second flag works.
    pub const HEAD: usize = 16;
    /// The alignment of its address.
    pub const ALIGN: usize = align_of::<u64>();
    const LEN_AT: usize = 8;

    /// An empty one, of `capacity` bytes at `memory` with the head.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::error::ErrorKind::InvalidArgument) when it is NULL, not aligned or too small; then
    /// it was not touched.
    ///
    /// # Safety
    /// The memory must stay allocated and be written by nobody else for as long as the outbox lives, but for the first byte,
    /// which a reader may clear, atomically, with release ordering, when it has read.
    pub unsafe fn new(memory: *mut u8, capacity: usize) -> Result<Self> {
        if memory.is_null() || !memory.addr().is_multiple_of(Self::ALIGN) || capacity < Self::HEAD {
            return Err(Error::invalid(format!(
                "outbox: {capacity} bytes at {memory:p}, expected at least {} bytes at a multiple of {}",
                Self::HEAD,
                Self::ALIGN
            )));
        }
        let outbox = Outbox { memory, capacity };
        outbox.full().store(0, Ordering::Release);
        outbox.set_more(false);
        Ok(outbox)
    }

    /// Leaves `report`, unless an earlier one has not been read or it is too long. Returns whether it did.
    pub fn put(&mut self, report: &[u8]) -> bool {
        if self.is_full() || report.len() > self.capacity - Self::HEAD {
            return false;
        }
        // SAFETY: `new` has checked that the head is there and aligned, and the line above that the report fits behind it;
        // its contract gives this side everything but the first byte, and the reader has been through with an earlier report,
        // as its release of that byte, acquired by `is_full`, says.
        unsafe {
            self.memory.add(Self::LEN_AT).cast::<u64>().write(report.len() as u64);
            self.memory.add(Self::HEAD).copy_from_nonoverlapping(report.as_ptr(), report.len());
        }
        self.full().store(1, Ordering::Release);
        true
    }

    /// True if a report waits.
    pub fn is_full(&self) -> bool {
        self.full().load(Ordering::Acquire) != 0
    }

    /// Takes the report back. The reader must not be reading it.
    pub fn clear(&mut self) {
        self.full().store(0, Ordering::Release);
    }

    /// Tells the reader whether a call would give it more.
    pub fn set_more(&self, more: bool) {
        // SAFETY: the second byte of the head, which `new` was promised; only ever used atomically.
        unsafe { AtomicU8::from_ptr(self.memory.add(1)) }.store(more.into(), Ordering::Release);
    }

    fn full(&self) -> &AtomicU8 {
        // SAFETY: the first byte of the head, which `new` was promised; only ever used atomically.
        unsafe { AtomicU8::from_ptr(self.memory) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_report_lies_there_until_it_is_read_and_nothing_is_written_behind_it() {
        let mut memory = [u64::MAX; 6];
        let at = memory.as_mut_ptr().cast::<u8>();
        // SAFETY: the array outlives the outbox and is touched through `at` alone; one word behind it is kept out.
        let mut outbox = unsafe { Outbox::new(at, 40) }.unwrap();
        // SAFETY: all reads and writes are of the array.
        let byte = |index: usize| unsafe { at.add(index).read() };
        assert_eq!((byte(0), byte(1)), (0, 0));
        assert!(outbox.put(b"twenty-four bytes of it."));
        assert_eq!((byte(0), byte(1), byte(8)), (1, 0, 24));
        assert_eq!((16..40).map(byte).collect::<Vec<_>>(), b"twenty-four bytes of it.");
        assert!(!outbox.put(b"later"), "the first has not been read");
        assert_eq!(byte(16), b't');
        // SAFETY: as above.
        unsafe { at.write(0) };
        assert!(!outbox.put(b"twenty-five bytes of it.."));
        assert!(!outbox.is_full());
        outbox.set_more(true);
        assert!(outbox.put(b"later"));
        assert_eq!((byte(0), byte(1), byte(8)), (1, 1, 5));
        outbox.clear();
        assert_eq!((byte(0), byte(1)), (0, 1));
        assert_eq!((40..48).map(byte).collect::<Vec<_>>(), [0xff; 8]);
    }

    #[test]
    fn memory_that_cannot_be_one_is_refused() {
        let mut memory = [0u64; 2];
        let at = memory.as_mut_ptr().cast::<u8>();
        // SAFETY: the array outlives all of them; what is refused is not touched.
        unsafe {
            assert!(Outbox::new(std::ptr::null_mut(), 64).is_err());
            assert!(Outbox::new(at.add(1), 15).is_err());
            let error = Outbox::new(at, 15).unwrap_err();
            assert!(error.message().starts_with("outbox: 15 bytes at 0x"), "{error}");
            let mut head = Outbox::new(at, 16).unwrap();
            assert!(!head.put(b"x"));
            assert!(head.put(b""));
        }
    }
}
