//! Status numbers and the text of the last error.

use std::ffi::c_char;

use super::boundary::{Out, slice_mut, with_last_error};
use crate::error::ErrorKind;

/// The status of a call: KVF_OK or the kind of error. A number is never changed or used again for another
/// kind; later releases may add some.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvf_code {
    /// Success.
    KVF_OK = 0,
    /// An argument is malformed: null, empty, of the wrong type or length, or contradicts another.
    KVF_INVALID_ARGUMENT = -1,
    /// The named thing is not known, or not any more (a stale id or handle).
    KVF_NOT_FOUND = -2,
    /// The thing exists already (an overlapping registration, a rank pushed twice with other contents).
    KVF_ALREADY_EXISTS = -3,
    /// A block id, offset or length lies outside its region.
    KVF_OUT_OF_RANGE = -4,
    /// Two engines cannot exchange KV caches: some named field differs.
    KVF_INCOMPATIBLE = -5,
    /// The installed UCX, CUDA driver or this build cannot do it.
    KVF_UNSUPPORTED = -6,
    /// Bytes from outside do not decode: truncated, damaged, or not kvferry's.
    KVF_CORRUPT = -7,
    /// Bytes from outside are of a protocol version that this build does not speak.
    KVF_VERSION_MISMATCH = -8,
    /// The other side could not be reached.
    KVF_UNREACHABLE = -9,
    /// The other side died, restarted, or broke the connection.
    KVF_PEER_DIED = -10,
    /// A stated time ran out.
    KVF_TIMEOUT = -11,
    /// The caller cancelled it.
    KVF_CANCELLED = -12,
    /// The port or address cannot be bound.
    KVF_ADDRESS_IN_USE = -13,
    /// No usable UCX was found at run time.
    KVF_UCX_MISSING = -14,
    /// UCX refused or failed an operation.
    KVF_UCX = -15,
    /// The CUDA driver refused or failed a call, or is absent.
    KVF_CUDA = -16,
    /// The object is shut down.
    KVF_SHUT_DOWN = -17,
    /// A bound is reached (queue, table, message size); try again later or raise the bound.
    KVF_EXHAUSTED = -18,
    /// The operating system refused a call.
    KVF_IO = -19,
    /// A bug in kvferry: a panic was caught at the boundary.
    KVF_INTERNAL = -20,
    /// The producer's lease on the blocks had run out, so what was read may be wrong.
    KVF_LEASE_EXPIRED = -21,
    /// The bytes that arrived are not those that the producer has: the fabric, a driver or the memory damaged them, or
    /// the producer changed them meanwhile.
    KVF_DIGEST_MISMATCH = -22,
}

/// The name of each kind: C's without the prefix, in lower case. The match is total, so that a new [`ErrorKind`]
/// does not compile until it has its number here.
const fn code_and_name(kind: ErrorKind) -> (kvf_code, &'static std::ffi::CStr) {
    use kvf_code::*;
    match kind {
        ErrorKind::InvalidArgument => (KVF_INVALID_ARGUMENT, c"invalid_argument"),
        ErrorKind::NotFound => (KVF_NOT_FOUND, c"not_found"),
        ErrorKind::AlreadyExists => (KVF_ALREADY_EXISTS, c"already_exists"),
        ErrorKind::OutOfRange => (KVF_OUT_OF_RANGE, c"out_of_range"),
        ErrorKind::Incompatible => (KVF_INCOMPATIBLE, c"incompatible"),
        ErrorKind::Unsupported => (KVF_UNSUPPORTED, c"unsupported"),
        ErrorKind::Corrupt => (KVF_CORRUPT, c"corrupt"),
        ErrorKind::VersionMismatch => (KVF_VERSION_MISMATCH, c"version_mismatch"),
        ErrorKind::Unreachable => (KVF_UNREACHABLE, c"unreachable"),
        ErrorKind::PeerDied => (KVF_PEER_DIED, c"peer_died"),
        ErrorKind::Timeout => (KVF_TIMEOUT, c"timeout"),
        ErrorKind::Cancelled => (KVF_CANCELLED, c"cancelled"),
        ErrorKind::AddressInUse => (KVF_ADDRESS_IN_USE, c"address_in_use"),
        ErrorKind::UcxMissing => (KVF_UCX_MISSING, c"ucx_missing"),
        ErrorKind::Ucx => (KVF_UCX, c"ucx"),
        ErrorKind::Cuda => (KVF_CUDA, c"cuda"),
        ErrorKind::ShutDown => (KVF_SHUT_DOWN, c"shut_down"),
        ErrorKind::Exhausted => (KVF_EXHAUSTED, c"exhausted"),
        ErrorKind::Io => (KVF_IO, c"io"),
        ErrorKind::Internal => (KVF_INTERNAL, c"internal"),
        ErrorKind::LeaseExpired => (KVF_LEASE_EXPIRED, c"lease_expired"),
        ErrorKind::DigestMismatch => (KVF_DIGEST_MISMATCH, c"digest_mismatch"),
    }
}

const KINDS: [ErrorKind; 22] = [
    ErrorKind::InvalidArgument,
    ErrorKind::NotFound,
    ErrorKind::AlreadyExists,
    ErrorKind::OutOfRange,
    ErrorKind::Incompatible,
    ErrorKind::Unsupported,
    ErrorKind::Corrupt,
    ErrorKind::VersionMismatch,
    ErrorKind::Unreachable,
    ErrorKind::PeerDied,
    ErrorKind::Timeout,
    ErrorKind::Cancelled,
    ErrorKind::AddressInUse,
    ErrorKind::UcxMissing,
    ErrorKind::Ucx,
    ErrorKind::Cuda,
    ErrorKind::ShutDown,
    ErrorKind::Exhausted,
    ErrorKind::Io,
    ErrorKind::Internal,
    ErrorKind::LeaseExpired,
    ErrorKind::DigestMismatch,
];

/// Gives the name of a status in lower case without the prefix, such as "not_found". It is "ok" for KVF_OK and
/// "unknown" for a number that this release does not have. The string lives as long as the process.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_status_name(status: i32) -> *const c_char {
    if status == kvf_code::KVF_OK as i32 {
        return c"ok".as_ptr();
    }
    let known = KINDS.into_iter().map(code_and_name).find(|(code, _)| *code as i32 == status);
    known.map_or(c"unknown", |(_, name)| name).as_ptr()
}

/// Copies the text of the calling thread's last failed call to `out`. At most `cap - 1` bytes and a NUL, cut between
/// characters. `*len` becomes the whole text's length without the NUL, so that a caller can come back with more room;
/// `len` may be NULL. `out` may be NULL when `cap` is 0. The text stays until the thread's next failed call; this
/// function itself leaves it as it is.
///
/// # Safety
/// `out` must be valid for writes of `cap` bytes, and `len` NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_last_error(out: *mut c_char, cap: usize, len: *mut usize) -> i32 {
    let copied = std::panic::catch_unwind(|| {
        // SAFETY: the caller's promise for `out` and `cap`.
        let Ok(room) = (unsafe { slice_mut(out.cast::<u8>(), cap, "out") }) else {
            return kvf_code::KVF_INVALID_ARGUMENT;
        };
        let len = if len.is_null() {
            None
        } else {
            // SAFETY: the caller's promise for `len`.
            let Ok(len) = (unsafe { Out::new(len, "len") }) else { return kvf_code::KVF_INVALID_ARGUMENT };
            Some(len)
        };
        with_last_error(|text| {
            if let Some((end, start)) = room.split_last_mut() {
                let mut cut = text.len().min(start.len());
                while !text.is_char_boundary(cut) {
                    cut = cut.saturating_sub(1);
                }
                let (copy, rest) = start.split_at_mut(cut);
                copy.copy_from_slice(text.as_bytes().get(..cut).unwrap_or_default());
                rest.fill(0);
                *end = 0;
            }
            if let Some(len) = len {
                len.write(text.len());
            }
        });
        kvf_code::KVF_OK
    });
    copied.unwrap_or(kvf_code::KVF_INTERNAL) as i32
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::ffi::CStr;

    use super::*;
    use crate::error::Error;
    use crate::ffi::boundary::run;

    #[test]
    fn codes_equal_the_error_kinds_and_have_names() {
        for kind in KINDS {
            let (code, name) = code_and_name(kind);
            assert_eq!(code as i32, kind.code());
            // SAFETY: a static string.
            assert_eq!(unsafe { CStr::from_ptr(kvf_status_name(kind.code())) }, name);
        }
        // SAFETY: static strings.
        unsafe {
            assert_eq!(CStr::from_ptr(kvf_status_name(0)), c"ok");
            assert_eq!(CStr::from_ptr(kvf_status_name(-9999)), c"unknown");
        }
    }

    #[test]
    fn the_last_error_is_cut_between_characters_and_tells_its_length() {
        run("f", || Err(Error::invalid("aä")));
        let mut len = 0;
        let mut room = [1u8; 8];
        // SAFETY: `room` and `len` are live; the lengths are theirs.
        unsafe {
            assert_eq!(kvf_last_error(std::ptr::null_mut(), 0, &raw mut len), 0);
            assert_eq!(len, "f: aä".len());
            assert_eq!(kvf_last_error(room.as_mut_ptr().cast(), 6, &raw mut len), 0);
            assert_eq!(CStr::from_ptr(room.as_ptr().cast()).to_str().unwrap(), "f: a");
            assert_eq!(kvf_last_error(room.as_mut_ptr().cast(), 7, &raw mut len), 0);
            assert_eq!(CStr::from_ptr(room.as_ptr().cast()).to_str().unwrap(), "f: aä");
            let invalid = kvf_code::KVF_INVALID_ARGUMENT as i32;
            assert_eq!(kvf_last_error(std::ptr::null_mut(), 5, &raw mut len), invalid);
            room.fill(1);
            assert_eq!(kvf_last_error(room.as_mut_ptr().cast(), 7, std::ptr::null_mut()), 0);
            assert_eq!(CStr::from_ptr(room.as_ptr().cast()).to_str().unwrap(), "f: aä");
        }
    }
}
