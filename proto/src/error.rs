//! The library's one error type: a stable numeric kind and a text that says what was wrong, what was expected, and
//! what to do about it.

use std::fmt;

/// The kind of an error. Its number is part of the C ABI (`kvf_status`): it is never changed or reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ErrorKind {
    /// An argument is malformed: null, empty, of the wrong type or length, or contradicts another.
    InvalidArgument = -1,
    /// The named thing is not known here, or not any more (a stale id or handle).
    NotFound = -2,
    /// The thing exists already (an overlapping registration, a rank pushed twice with other contents).
    AlreadyExists = -3,
    /// A block id, offset or length lies outside its region.
    OutOfRange = -4,
    /// Two engines cannot exchange KV caches: some named field differs.
    Incompatible = -5,
    /// The installed UCX, CUDA driver or this build cannot do it.
    Unsupported = -6,
    /// Bytes from outside do not decode: truncated, damaged, or not kvferry's.
    Corrupt = -7,
    /// Bytes from outside are of a protocol version that this build does not speak.
    VersionMismatch = -8,
    /// The other side could not be reached.
    Unreachable = -9,
    /// The other side died, restarted, or broke the connection.
    PeerDied = -10,
    /// A stated time ran out.
    Timeout = -11,
    /// The caller cancelled it.
    Cancelled = -12,
    /// The port or address cannot be bound.
    AddressInUse = -13,
    /// No usable UCX was found at run time.
    UcxMissing = -14,
    /// UCX refused or failed an operation.
    Ucx = -15,
    /// The CUDA driver refused or failed a call, or is absent.
    Cuda = -16,
    /// The object is shut down.
    ShutDown = -17,
    /// A bound is reached (queue, table, message size); try again later or raise the bound.
    Exhausted = -18,
    /// The operating system refused a call.
    Io = -19,
    /// A bug in kvferry: a panic was caught at the C boundary.
    Internal = -20,
    /// The producer's lease on the blocks had run out, so what was read may be wrong.
    LeaseExpired = -21,
    /// The bytes that arrived are not those that the producer has: the fabric, a driver or the memory damaged them, or
    /// the producer changed them meanwhile.
    DigestMismatch = -22,
}

impl ErrorKind {
    /// The number that crosses the C ABI.
    pub fn code(self) -> i32 {
        self as i32
    }
}

/// An [`ErrorKind`] and its explanation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind`, explained by `message`.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error { kind, message: message.into() }
    }

    /// [`ErrorKind::InvalidArgument`] with `message`.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// [`ErrorKind::NotFound`] with `message`.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    /// [`ErrorKind::Corrupt`] with `message`.
    pub fn corrupt(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Corrupt, message)
    }

    /// The kind of error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The explanation, without the kind.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The same error with `what` put before its text, to say where it happened.
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
