//! UCX's status codes and the error type of this layer.

use std::ffi::CStr;
use std::fmt;
use std::os::raw::c_void;

use ucx_sys::{ucs_status_ptr_t, ucs_status_t};

use super::raw;

/// A status of UCX: 0 is success, negative is an error. An integer and not an enum, because a newer UCX may
/// return codes unknown to this build.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Status(pub i32);

impl Status {
    /// Success.
    pub const OK: Self = Self::from_raw(ucx_sys::UCS_OK);
    /// An argument was refused.
    pub const INVALID_PARAM: Self = Self::from_raw(ucx_sys::UCS_ERR_INVALID_PARAM);
    /// Memory ran out.
    pub const NO_MEMORY: Self = Self::from_raw(ucx_sys::UCS_ERR_NO_MEMORY);
    /// No transport reaches the peer.
    pub const UNREACHABLE: Self = Self::from_raw(ucx_sys::UCS_ERR_UNREACHABLE);
    /// Something was not found.
    pub const NO_ELEM: Self = Self::from_raw(ucx_sys::UCS_ERR_NO_ELEM);
    /// The operation was cancelled, for example by a forced close.
    pub const CANCELED: Self = Self::from_raw(ucx_sys::UCS_ERR_CANCELED);
    /// An address range left its registered memory.
    pub const OUT_OF_RANGE: Self = Self::from_raw(ucx_sys::UCS_ERR_OUT_OF_RANGE);
    /// A limit was exceeded.
    pub const EXCEEDS_LIMIT: Self = Self::from_raw(ucx_sys::UCS_ERR_EXCEEDS_LIMIT);
    /// This UCX cannot do it.
    pub const UNSUPPORTED: Self = Self::from_raw(ucx_sys::UCS_ERR_UNSUPPORTED);
    /// The endpoint is closed.
    pub const NOT_CONNECTED: Self = Self::from_raw(ucx_sys::UCS_ERR_NOT_CONNECTED);
    /// The peer closed the connection or died.
    pub const CONNECTION_RESET: Self = Self::from_raw(ucx_sys::UCS_ERR_CONNECTION_RESET);
    /// The peer stopped answering.
    pub const ENDPOINT_TIMEOUT: Self = Self::from_raw(ucx_sys::UCS_ERR_ENDPOINT_TIMEOUT);
    /// A time limit passed.
    pub const TIMED_OUT: Self = Self::from_raw(ucx_sys::UCS_ERR_TIMED_OUT);
    /// No usable libucp was found. Not one of UCX's codes, which end at -100.
    pub const NO_LIBRARY: Self = Self(-1001);
    /// Bytes that should be an exported address or rkey are not. Not one of UCX's codes.
    pub const MALFORMED: Self = Self(-1002);

    pub(super) const fn from_raw(raw: ucs_status_t) -> Self {
        Self(raw.0 as i32)
    }

    /// True for success only.
    pub const fn is_ok(self) -> bool {
        self.0 == 0
    }

    /// `Ok` for success, else the error of the operation `op`.
    pub(super) fn check(self, op: &'static str, detail: impl FnOnce() -> String) -> Result<(), UcxError> {
        if self.is_ok() { Ok(()) } else { Err(UcxError { status: self, op, detail: detail() }) }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NO_LIBRARY => return out.write_str("no usable UCX"),
            Self::MALFORMED => return out.write_str("malformed bytes"),
            _ => {}
        }
        match (raw::opened(), i8::try_from(self.0)) {
            (Some(raw), Ok(code)) => {
                // SAFETY: ucs_status_string accepts any code and returns a NUL-terminated string that is
                // static or thread-local; it is read before any other call of UCX.
                let text = unsafe { CStr::from_ptr(raw.ucs_status_string(ucs_status_t(code as _))) };
                write!(out, "{} (UCX status {})", text.to_string_lossy(), self.0)
            }
            _ => write!(out, "UCX status {}", self.0),
        }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

/// An error of UCX, or of a call that was refused before it reached UCX.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UcxError {
    /// UCX's code, or the one of [`Status`]'s that fits.
    pub status: Status,
    /// The operation that failed. It is the name of UCX's function, or of ours where UCX was not asked.
    pub op: &'static str,
    /// The object of the error, and a remedy where one is known. May be empty.
    pub detail: String,
}

impl UcxError {
    pub(super) fn new(op: &'static str, status: Status, detail: impl Into<String>) -> Self {
        Self { status, op, detail: detail.into() }
    }

    pub(super) fn invalid(op: &'static str, detail: impl Into<String>) -> Self {
        Self::new(op, Status::INVALID_PARAM, detail)
    }
}

impl fmt::Display for UcxError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.op, self.status)?;
        if self.detail.is_empty() { Ok(()) } else { write!(out, ": {}", self.detail) }
    }
}

impl std::error::Error for UcxError {}

/// The result of a non-blocking function of UCX: the three cases of a `ucs_status_ptr_t`.
pub(super) enum PostResult {
    /// Done already; no callback will come.
    Done,
    /// Refused or failed already; no callback will come.
    Failed(Status),
    /// Under way; the callback will come, and the request must be freed after it.
    Pending(*mut c_void),
}

/// Tells the three cases apart, as the macros UCS_PTR_IS_ERR and UCS_PTR_STATUS of ucs/type/status.h do.
pub(super) fn post_result(pointer: ucs_status_ptr_t) -> PostResult {
    let value = pointer as isize;
    let last = ucx_sys::UCS_ERR_LAST.0 as isize;
    if value == 0 {
        PostResult::Done
    } else if value >= last && value < 0 {
        PostResult::Failed(Status(i32::try_from(value).unwrap_or(i32::MIN)))
    } else {
        PostResult::Pending(pointer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_pointers_are_told_apart() {
        assert!(matches!(post_result(std::ptr::null_mut()), PostResult::Done));
        assert!(matches!(post_result(-16isize as *mut c_void), PostResult::Failed(Status::CANCELED)));
        assert!(matches!(post_result(-100isize as *mut c_void), PostResult::Failed(Status(-100))));
        assert!(matches!(post_result(-101isize as *mut c_void), PostResult::Pending(_)));
        assert!(matches!(post_result(0x1000 as *mut c_void), PostResult::Pending(_)));
    }

    #[test]
    fn an_error_tells_operation_status_and_detail() {
        let error = UcxError::new("open", Status::NO_LIBRARY, "pip install libucx-cu12");
        assert_eq!(error.to_string(), "open: no usable UCX: pip install libucx-cu12");
    }
}
