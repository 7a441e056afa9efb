"""Moves KV-cache blocks between the processes of LLM inference engines, on UCX.

`Agent` moves bytes between registered memory of two processes. `Worker` and `Scheduler` are the two sides of a KV
connector for one engine; `Aggregator` combines the reports of several workers; `Listener` serves handshakes alone.
`plan.describe` tells what two engines will do, and `python -m kvferry plan` shows it. `settings.describe` tells every
key of the configuration, and `python -m kvferry config` shows them.
The connector for vLLM is in `kvferry.vllm`.
"""

from typing import TYPE_CHECKING

from . import log, plan, settings, stats
from ._errors import (
    AddressInUseError,
    AlreadyExistsError,
    CancelledError,
    CorruptError,
    CudaError,
    DigestMismatchError,
    ExhaustedError,
    IncompatibleError,
    InternalError,
    InvalidArgumentError,
    KvferryError,
    LeaseExpiredError,
    NotFoundError,
    OsError,
    OutOfRangeError,
    PeerDiedError,
    ShutDownError,
    TimedOutError,
    UcxError,
    UcxMissingError,
    UnreachableError,
    UnsupportedError,
    VersionMismatchError,
)
from ._find import header_path, library_path, release
from ._lib import abi_version, protocol_versions, ucx_info, version
from .agent import Agent, Event, Message, PeerConnected, PeerLost, Region, Route, Segment, Transfer, TransferDone
from .aggregator import Aggregator, Outcome, RankRecord
from .listener import Listener
from .scheduler import Scheduler
from .worker import Rank, RecvFailure, RecvRecord, Report, Worker, decode_report, encode_report, merge_reports

if TYPE_CHECKING:
    __version__: str
    """The release of this package, which is that of the library beside it."""
else:

    def __getattr__(name: str) -> str:
        if name == "__version__":
            return release()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AddressInUseError",
    "Agent",
    "Aggregator",
    "AlreadyExistsError",
    "CancelledError",
    "CorruptError",
    "CudaError",
    "DigestMismatchError",
    "Event",
    "ExhaustedError",
    "IncompatibleError",
    "InternalError",
    "InvalidArgumentError",
    "KvferryError",
    "LeaseExpiredError",
    "Listener",
    "Message",
    "NotFoundError",
    "OsError",
    "OutOfRangeError",
    "Outcome",
    "PeerConnected",
    "PeerDiedError",
    "PeerLost",
    "Rank",
    "RankRecord",
    "RecvFailure",
    "RecvRecord",
    "Region",
    "Report",
    "Route",
    "Scheduler",
    "Segment",
    "ShutDownError",
    "TimedOutError",
    "Transfer",
    "TransferDone",
    "UcxError",
    "UcxMissingError",
    "UnreachableError",
    "UnsupportedError",
    "VersionMismatchError",
    "Worker",
    "abi_version",
    "decode_report",
    "encode_report",
    "header_path",
    "library_path",
    "log",
    "merge_reports",
    "plan",
    "protocol_versions",
    "settings",
    "stats",
    "ucx_info",
    "version",
]
