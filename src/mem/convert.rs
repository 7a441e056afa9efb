//! UCX's errors as the library's.

use crate::error::{Error, ErrorKind};
use crate::ucx::{Status, UcxError};

/// Converts a UCX error. The kind follows UCX's status, the text is that of UCX's wrapper.
pub fn ucx_error(error: UcxError) -> Error {
    let kind = match error.status {
        Status::NO_LIBRARY => ErrorKind::UcxMissing,
        Status::MALFORMED => ErrorKind::Corrupt,
        Status::INVALID_PARAM | Status::NO_ELEM => ErrorKind::InvalidArgument,
        Status::OUT_OF_RANGE => ErrorKind::OutOfRange,
        Status::UNSUPPORTED => ErrorKind::Unsupported,
        Status::UNREACHABLE => ErrorKind::Unreachable,
        Status::CONNECTION_RESET | Status::ENDPOINT_TIMEOUT | Status::NOT_CONNECTED | Status::CANCELED => {
            ErrorKind::PeerDied
        }
        Status::NO_MEMORY | Status::EXCEEDS_LIMIT => ErrorKind::Exhausted,
        Status::TIMED_OUT => ErrorKind::Timeout,
        _ => ErrorKind::Ucx,
    };
    Error::new(kind, error.to_string())
}
