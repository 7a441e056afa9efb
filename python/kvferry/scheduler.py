"""The scheduler side of a KV connector: one per engine, in the process that schedules requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal, cast

from . import _lib, _wire
from .aggregator import Outcome as OutcomeDict

Outcome = Literal["complete", "aborted"]
BlockLists = Sequence[_lib.Ids]


class Scheduler:
    """The scheduler side: decides what to send and load, and serves the ranks' metadata to other engines.

    It touches no device memory and no UCX. May be used from any thread; calls on one object are serialized.

    `params` below is a request's `kv_transfer_params`; a missing or ill-typed key raises `InvalidArgumentError` that
    names it, and affects that request only. A key that is None counts as missing. `blocks` is one list of block ids per
    KV-cache group; a numpy uint32 array per group is taken without conversion.

    A request may be given to both engines at once: the producer's params then have a `transfer_id`, and the consumer's
    the same one beside `remote_engine_id`, `remote_host` and `remote_port` (docs/vllm.md). Its load waits until
    the producer has finished it and its workers have the lease, which their reports tell the producer's scheduler.

    Several requests of a consumer may load the same prefill: the producer keeps its blocks until the last of them that
    is known is over. Where others may come later, give the key `shared` (True) in the params of each to the consumer's
    calls: the prefill is then kept for them for 5 s.

    Args:
        config: The keys of a scheduler, see `kvferry.settings`, `kvferry config --all` and docs/configuration.md. Only
            `engine_id` and `groups` (as in the geometry of any rank, see `Worker.set_geometry`) have no default. An
            unknown key or a wrong value raises `InvalidArgumentError` that names it.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self._handle = _lib.scheduler_start(_wire.pack("config", config))

    def set_engine(self, ranks: Mapping[tuple[int, int], bytes]) -> None:
        """Takes the metadata of all ranks, by (pp_rank, tp_rank), without serving it.

        Enough for an engine that only receives. One of several ranks needs it before its first load.
        """
        _lib.scheduler_set_engine(self._handle, ranks)

    def serve(self, ranks: Mapping[tuple[int, int], bytes]) -> tuple[str, int]:
        """Starts the handshake listener with `{(pp_rank, tp_rank): Worker.metadata()}` of all ranks.

        Returns the host and port that other engines are told. It is bound when this returns.
        """
        return _lib.scheduler_serve(self._handle, ranks)

    def arrived(self, request: str, params: Mapping[str, object]) -> None:
        """Consumer: a request with a remote prefill has arrived. Connect early and keep its lease alive."""
        _lib.scheduler_arrived(self._handle, request, _wire.pack("kv_transfer_params", params))

    def matched(
        self, request: str, params: Mapping[str, object], prompt_tokens: int, computed_tokens: int
    ) -> tuple[int, bool]:
        """How many tokens beyond `computed_tokens` can be loaded, and whether the load is asynchronous.

        Has no side effects.
        """
        return _lib.scheduler_matched(
            self._handle, request, _wire.pack("kv_transfer_params", params), prompt_tokens, computed_tokens
        )

    def allocated(
        self,
        request: str,
        params: Mapping[str, object],
        blocks: BlockLists,
        prompt_tokens: int,
        external_tokens: int,
    ) -> None:
        """Consumer: these local blocks are to be filled with the last `external_tokens` of `prompt_tokens` tokens.

        0 external tokens give the lease back.

        A second call for the same request does nothing.
        """
        _lib.scheduler_allocated(
            self._handle, request, _wire.pack("kv_transfer_params", params), blocks, prompt_tokens, external_tokens
        )

    def finished(
        self,
        request: str,
        params: Mapping[str, object],
        outcome: Outcome,
        blocks: BlockLists,
        computed_tokens: int,
    ) -> tuple[bool, dict[str, object] | None]:
        """A request ended. Returns whether its blocks must be kept until `finished_sending`, and the
        `kv_transfer_params` to return to the client (None if there are none)."""
        keep, answer = _lib.scheduler_finished(
            self._handle, request, _wire.pack("kv_transfer_params", params), outcome, blocks, computed_tokens
        )
        return keep, None if answer is None else _wire.unpack_map("kv_transfer_params", answer)

    def step(self) -> bytes:
        """What is new for the workers, for `Worker.submit` of every rank. Each piece of work is handed out once."""
        return _lib.scheduler_step(self._handle)

    def has_pending(self) -> bool:
        """Whether there is work that `step` would hand out."""
        return _lib.scheduler_has_pending(self._handle)

    def report(self, report: bytes) -> OutcomeDict:
        """Takes in one rank's encoded report (`Worker.poll_encoded`), or several as `merge_reports` made them, and
        returns what is known with it: what every rank has ended, each request once, and the report's figures.

        Every rank's reports are needed, each as it comes; their order does not matter. One that comes again ends
        nothing twice; one of a rank that the engine has not (`tp_size`, `pp_size`) raises `InvalidArgumentError`.
        """
        return cast(OutcomeDict, _wire.decode_outcome(_lib.scheduler_report(self._handle, report)))

    def note(self, report: bytes) -> None:
        """As `report`, for hosts that know by themselves what all ranks have ended: the outcome is not made."""
        _lib.scheduler_note(self._handle, report)

    def over(self, request: str, side: Literal["sending", "recving"]) -> None:
        """Every rank is done with a request on that side, as the host knows by its own count.

        It is over then, also where the ranks' reports come later or never. One that is over already, or not known, is
        no error. Its id must not be used again before the reports have come, which would count for the new request.
        """
        _lib.scheduler_over(self._handle, request, side)

    def stats(self) -> dict[str, object]:
        """Counters since the start, and gauges; `kvferry.stats.metrics` tells what each is."""
        return _wire.unpack_map("stats", _lib.scheduler_stats(self._handle))

    def shutdown(self) -> None:
        """Stops the listener and frees the scheduler. Calling it again does nothing."""
        self._handle.free()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
