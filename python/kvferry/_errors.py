"""The exceptions of this package: one class per kind of error, all of them `KvferryError`."""

from __future__ import annotations

import errno


class KvferryError(Exception):
    """An error that libkvferry reported.

    Those that are also an `OSError` have no `filename`. Their `strerror` is the message; their `errno` is that of the
    kind, or None where the kind does not tell it.

    Attributes:
        code: The number of the error's kind, as in `kvferry.h` (`KVF_NOT_FOUND` is -2). Never changed or reused.
        name: The kind's name in lower case, such as `not_found`.
        message: What was wrong, what was expected and what to do.
    """

    code: int
    name: str
    message: str

    def __init__(self, code: int, name: str, message: str) -> None:
        # Not through OSError, which takes them for a number of the system, its text and a file.
        super().__init__()
        self.args = code, name, message
        if isinstance(self, OSError):
            _describe(self, message)
        self.code = code
        self.name = name
        self.message = message

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


class InvalidArgumentError(KvferryError, ValueError):
    """An argument is malformed: empty, of the wrong type or length, or contradicts another."""


class NotFoundError(KvferryError, LookupError):
    """The named thing is not known, or not any more (a stale id or handle)."""


class AlreadyExistsError(KvferryError):
    """The thing exists already, such as an overlapping registration."""


class OutOfRangeError(KvferryError, IndexError):
    """A block id, offset or length lies outside its region."""


class IncompatibleError(KvferryError):
    """Two engines cannot exchange KV caches: the message names the field that differs and both values."""


class UnsupportedError(KvferryError, NotImplementedError):
    """The installed UCX, CUDA driver or this build cannot do it."""


class CorruptError(KvferryError, ValueError):
    """Bytes from outside do not decode: truncated, damaged, or not kvferry's."""


class VersionMismatchError(KvferryError):
    """Bytes from outside are of a protocol version that this build does not speak."""


class UnreachableError(KvferryError, ConnectionError):
    """The other side could not be reached."""


class PeerDiedError(KvferryError, ConnectionError):
    """The other side died, restarted, or broke the connection."""


class TimedOutError(KvferryError, TimeoutError):
    """A stated time ran out."""


class CancelledError(KvferryError):
    """The caller cancelled it."""


class AddressInUseError(KvferryError, OSError):
    """The port or address cannot be bound."""


class UcxMissingError(KvferryError, RuntimeError):
    """No usable UCX was found; the message says where it was searched for and how to install it."""


class UcxError(KvferryError):
    """UCX refused or failed an operation."""


class CudaError(KvferryError):
    """The CUDA driver refused or failed a call, or is absent."""


class ShutDownError(KvferryError):
    """The object is shut down."""


class ExhaustedError(KvferryError):
    """A bound is reached (queue, table, message size): try again later or raise the bound."""


class OsError(KvferryError, OSError):
    """The operating system refused a call."""


class InternalError(KvferryError, RuntimeError):
    """A bug in kvferry: a panic was caught at the C boundary."""


class LeaseExpiredError(KvferryError):
    """The producer's lease on the blocks had run out, so what was read may be wrong."""


class DigestMismatchError(KvferryError):
    """The bytes that arrived are not those that the producer has."""


def _describe(error: OSError, message: str) -> None:
    error.errno, error.strerror = _ERRNO.get(type(error)), message


_ERRNO: dict[type, int] = {
    UnreachableError: errno.EHOSTUNREACH,
    PeerDiedError: errno.ECONNRESET,
    TimedOutError: errno.ETIMEDOUT,
    AddressInUseError: errno.EADDRINUSE,
}

_CLASSES: dict[str, type[KvferryError]] = {
    "invalid_argument": InvalidArgumentError,
    "not_found": NotFoundError,
    "already_exists": AlreadyExistsError,
    "out_of_range": OutOfRangeError,
    "incompatible": IncompatibleError,
    "unsupported": UnsupportedError,
    "corrupt": CorruptError,
    "version_mismatch": VersionMismatchError,
    "unreachable": UnreachableError,
    "peer_died": PeerDiedError,
    "timeout": TimedOutError,
    "cancelled": CancelledError,
    "address_in_use": AddressInUseError,
    "ucx_missing": UcxMissingError,
    "ucx": UcxError,
    "cuda": CudaError,
    "shut_down": ShutDownError,
    "exhausted": ExhaustedError,
    "io": OsError,
    "internal": InternalError,
    "lease_expired": LeaseExpiredError,
    "digest_mismatch": DigestMismatchError,
}


def make_error(code: int, name: str, message: str) -> KvferryError:
    """The exception for an error code; `KvferryError` itself for a kind that this package does not know."""
    return _CLASSES.get(name, KvferryError)(code, name, message)


def invalid(message: str) -> KvferryError:
    """The exception for an argument that cannot be."""
    return make_error(-1, "invalid_argument", message)
