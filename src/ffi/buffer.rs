//! Byte strings that the library makes and the caller frees.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::boundary::Out;
use crate::error::{Error, Result};
use crate::sys::fork::PerProcess;

/// A byte string made by the library. Read `len` bytes at `data`, change nothing, and give it back with
/// `kvf_buffer_free`. An empty one has `data` NULL.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvf_buffer {
    /// The bytes.
    pub data: *const u8,
    /// How many.
    pub len: usize,
    /// Tells this buffer from every other.
    pub id: u64,
}

struct LiveBuffers {
    /// Ids below are of the process from which this one was forked.
    first: u64,
    next: AtomicU64,
    bytes: Mutex<HashMap<u64, Box<[u8]>>>,
}

static LIVE: PerProcess<LiveBuffers> = PerProcess::new(|earlier: Option<&LiveBuffers>| {
    let first = earlier.map_or(1, |earlier| earlier.next.load(Ordering::Relaxed));
    LiveBuffers { first, next: AtomicU64::new(first), bytes: Mutex::default() }
});

impl LiveBuffers {
    /// Frees a buffer; false if there was none. One that a fork has copied stays: another thread may have held the lock of its table.
    fn free(&self, id: u64) -> bool {
        id < self.first || self.bytes.lock().unwrap_or_else(PoisonError::into_inner).remove(&id).is_some()
    }
}

/// Writes `bytes` to an out-parameter as a buffer.
pub(super) fn give(out: Out<kvf_buffer>, bytes: Vec<u8>) {
    if bytes.is_empty() {
        out.write(kvf_buffer { data: std::ptr::null(), len: 0, id: 0 });
        return;
    }
    let bytes = bytes.into_boxed_slice();
    let live = LIVE.get();
    let id = live.next.fetch_add(1, Ordering::Relaxed);
    let buffer = kvf_buffer { data: bytes.as_ptr(), len: bytes.len(), id };
    live.bytes.lock().unwrap_or_else(PoisonError::into_inner).insert(id, bytes);
    out.write(buffer);
}

/// Gives a buffer back and empties `*buffer`. Freeing it again, or freeing an empty one, does nothing; freeing a second
/// copy of the struct is KVF_NOT_FOUND. Of a buffer that a fork has copied only `*buffer` is emptied.
///
/// # Safety
/// `buffer` must be NULL or point to a `kvf_buffer`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_buffer_free(buffer: *mut kvf_buffer) -> i32 {
    boundary!(kvf_buffer_free, {
        // SAFETY: the caller passes NULL or a valid struct.
        let out = unsafe { Out::new(buffer, "buffer")? };
        // SAFETY: `Out::new` has refused NULL and misaligned pointers, the rest is the caller's promise.
        let given = unsafe { buffer.read() };
        if given.id == 0 {
            if !given.data.is_null() || given.len != 0 {
                return Err(Error::not_found("this buffer was not made by this library"));
            }
        } else if !LIVE.get().free(given.id) {
            return Err(Error::not_found(format!(
                "buffer {} is freed already or was not made by this library",
                given.id
            )));
        }
        out.write(kvf_buffer { data: std::ptr::null(), len: 0, id: 0 });
        Ok(())
    })
}

/// Runs `make` and writes what it made to the out-parameter `out` as a buffer.
///
/// # Safety
/// `out` must be NULL or point to memory for a `kvf_buffer`.
pub(super) unsafe fn fill(out: *mut kvf_buffer, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<()> {
    // SAFETY: this function's contract.
    let out = unsafe { Out::new(out, "out")? };
    give(out, make()?);
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn make(bytes: &[u8]) -> kvf_buffer {
        let mut buffer = kvf_buffer { data: std::ptr::null(), len: 99, id: 99 };
        // SAFETY: `buffer` is a live struct.
        unsafe { fill(&raw mut buffer, || Ok(bytes.to_vec())) }.unwrap();
        buffer
    }

    #[test]
    fn a_buffer_is_freed_once_whatever_the_caller_does() {
        let mut buffer = make(b"bytes");
        let mut copy = buffer;
        // SAFETY: the buffer is live and its struct valid.
        unsafe {
            assert_eq!(std::slice::from_raw_parts(buffer.data, buffer.len), b"bytes");
            assert_eq!(kvf_buffer_free(&raw mut buffer), 0);
            assert!(buffer.data.is_null() && buffer.len == 0);
            assert_eq!(kvf_buffer_free(&raw mut buffer), 0);
            let other = make(b"other");
            assert_eq!(kvf_buffer_free(&raw mut copy), ErrorKind::NotFound.code());
            assert_eq!(std::slice::from_raw_parts(other.data, other.len), b"other");
            let mut other = other;
            assert_eq!(kvf_buffer_free(&raw mut other), 0);
            let mut foreign = kvf_buffer { data: b"mine".as_ptr(), len: 4, id: 0 };
            assert_eq!(kvf_buffer_free(&raw mut foreign), ErrorKind::NotFound.code());
            assert_eq!(kvf_buffer_free(std::ptr::null_mut()), ErrorKind::InvalidArgument.code());
        }
    }

    #[test]
    fn an_empty_buffer_needs_no_free_and_bears_one() {
        let mut buffer = make(b"");
        assert!(buffer.data.is_null() && buffer.len == 0 && buffer.id == 0);
        // SAFETY: `buffer` is a live struct.
        assert_eq!(unsafe { kvf_buffer_free(&raw mut buffer) }, 0);
    }

    #[test]
    fn nothing_is_written_on_failure() {
        let mut buffer = kvf_buffer { data: std::ptr::null(), len: 99, id: 98 };
        // SAFETY: `buffer` is a live struct.
        unsafe { fill(&raw mut buffer, || Err(Error::not_found("no"))) }.unwrap_err();
        assert_eq!((buffer.len, buffer.id), (99, 98));
    }
}
