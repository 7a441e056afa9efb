"""The scheduler side of a KV connector: one per engine, in the process that schedules requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

from . import _lib, _wire
from ._errors import invalid
from .aggregator import SIDES
from .aggregator import Outcome as OutcomeDict

Outcome = Literal["complete", "aborted"]
Params = Mapping[str, object] | bytes
BlockLists = Sequence[_lib.Ids]
_OUTCOMES = {"complete": "KVF_COMPLETE", "aborted": "KVF_ABORTED"}


class Scheduler(AbstractContextManager["Scheduler"]):
    """The scheduler side: decides what to send and load, and serves the ranks' metadata to other engines.

    It touches no device memory and no UCX. May be used from any thread; calls on one object are serialized.

    `params` below is a request's `kv_transfer_params`; a missing or ill-typed key raises `InvalidArgumentError` that
    names it, and affects that request only. A key that is None counts as missing. Params may be given as the bytes of
    their msgpack map, packed once for several calls. `blocks` is one list of block ids per KV-cache group; a numpy
    uint32 array per group is taken without conversion.

    A request may be given to both engines at once: the producer's params then have a `transfer_id`, and the consumer's
    the same one beside `remote_engine_id`, `remote_host` and `remote_port` (docs/vllm.md). Its load waits until
    the producer has finished it and its workers have the lease, which their reports tell the producer's scheduler.

    Several requests of a consumer may load the same prefill: the producer keeps its blocks until the last of them that
    is known is over. Where others may come later, give the key `shared` (True) in the params of each to the consumer's
    calls: the prefill is then kept for them for 5 s.

    With `multi_turn`, a consumer keeps what it has of a complete request (`num_blocks` says how much it may), and the
    answer of `finished` is for the producer of the conversation's next turn. That producer's calls load it; their
    `prompt_tokens` are how many tokens at the prompt's beginning the blocks hold too, which the caller has to know.

    Args:
        config: The keys of a scheduler, see `kvferry.settings`, `kvferry config --all` and docs/configuration.md. Only
            `engine_id` and `groups` (as in the geometry of any rank, see `Worker.set_geometry`) have no default. An
            unknown key or a wrong value raises `InvalidArgumentError` that names it.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self._handle = _lib.Handle("scheduler", _wire.pack("config", config))

    def set_engine(self, ranks: Mapping[tuple[int, int], bytes]) -> None:
        """Takes the metadata of all ranks, by (pp_rank, tp_rank), without serving it.

        Enough for an engine that only receives. One of several ranks needs it before its first load.
        """
        blobs, _keep = _rank_list(ranks)
        self._handle.call("set_engine", blobs, len(ranks))

    def renew(self, ranks: Mapping[tuple[int, int], bytes]) -> None:
        """Takes the metadata of all ranks in place of what was given before.

        Their workers were started anew and hold the same parts of the cache, as after a sleep in which its memory was
        freed (`Worker.suspend`).

        The next step tells the new workers of the requests that wait to be loaded.
        """
        blobs, _keep = _rank_list(ranks)
        self._handle.call("renew", blobs, len(ranks))

    def serve(self, ranks: Mapping[tuple[int, int], bytes]) -> tuple[str, int]:
        """Starts the handshake listener with `{(pp_rank, tp_rank): Worker.metadata()}` of all ranks.

        Returns the host and port that other engines are told. It is bound when this returns.
        """
        blobs, _keep = _rank_list(ranks)
        return self._handle.address("serve", blobs, len(ranks))

    def arrived(self, request: str, params: Params) -> None:
        """Consumer: a request with a remote prefill has arrived. Connect early and keep its lease alive."""
        self._handle.call("arrived", *_of(request, params))

    def matched(self, request: str, params: Params, prompt_tokens: int, computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond `computed_tokens` can be loaded, and whether the load is asynchronous.

        Has no side effects.
        """
        tokens, asynchronous = _lib.new("uint64_t *"), _lib.new("uint8_t *")
        prompt, computed = _lib.whole("prompt_tokens", prompt_tokens), _lib.whole("computed_tokens", computed_tokens)
        self._handle.call("matched", *_of(request, params), prompt, computed, tokens, asynchronous)
        return tokens[0], asynchronous[0] != 0

    def allocated(
        self,
        request: str,
        params: Params,
        blocks: BlockLists,
        prompt_tokens: int,
        external_tokens: int,
    ) -> None:
        """Consumer: these local blocks are to be filled with the last `external_tokens` of `prompt_tokens` tokens.

        0 external tokens give the lease back.

        A second call for the same request does nothing.
        """
        lists = _lib.Lists(blocks, "blocks")
        prompt, external = _lib.whole("prompt_tokens", prompt_tokens), _lib.whole("external_tokens", external_tokens)
        self._handle.call("allocated", *_of(request, params), lists.ids, lists.offsets, lists.count, prompt, external)

    def is_followed(self, name: str) -> bool:
        """Producer: whether a consumer wants to know how far the prefill is that it awaits as `name` (its
        `transfer_id`), so that `progressed` is worth calling."""
        followed = _lib.new("uint8_t *")
        self._handle.call("is_followed", _lib.text("a name", name), followed)
        return bool(followed[0])

    def progressed(self, request: str, name: str, blocks: BlockLists, tokens: int) -> None:
        """Producer: the first `tokens` tokens of a prefill under way, awaited as `name` (its `transfer_id`), are
        written by all ranks, into these blocks of its own (a list for each KV-cache group; those of groups with
        windows, chunks or states are ignored).

        Consumers read them from now on, and rely on them if the lease is granted at the end (`finished`). 0 tokens: the
        blocks given before are given away, as when the request is preempted; to be said before others are given.

        To be called until `finished` is, and after it, while the blocks are kept, if what was written last is known
        only then. Optional.
        """
        lists = _lib.Lists(blocks, "blocks")
        self._handle.call(
            "progressed",
            _lib.text("a request id", request),
            _lib.text("a name", name),
            lists.ids,
            lists.offsets,
            lists.count,
            _lib.whole("tokens", tokens),
        )

    def finished(
        self,
        request: str,
        params: Params,
        outcome: Outcome,
        blocks: BlockLists,
        computed_tokens: int,
    ) -> tuple[bool, dict[str, object] | None]:
        """A request ended. Returns whether its blocks must be kept until `finished_sending`, and the
        `kv_transfer_params` to return to the client (None if there are none)."""
        number, lists = _lib.constant(_OUTCOMES, "outcome", outcome), _lib.Lists(blocks, "blocks")
        computed = _lib.whole("computed_tokens", computed_tokens)
        keep, out = _lib.new("uint8_t *"), _lib.new("kvf_buffer *")
        self._handle.call(
            "finished", *_of(request, params), number, lists.ids, lists.offsets, lists.count, computed, keep, out
        )
        answer = _lib.take(out)
        return keep[0] != 0, _wire.unpack_map("kv_transfer_params", answer) if answer else None

    def step(self) -> bytes:
        """The new work for the workers, for `Worker.submit` of every rank. Each piece of work is handed out once."""
        return self._handle.ask("step")

    def has_pending(self) -> bool:
        """True if there is work that `step` would hand out."""
        return bool(self._handle.number("uint8_t", "has_pending"))

    def report(self, report: bytes) -> OutcomeDict:
        """Takes in one rank's encoded report (`Worker.poll_encoded`), or several as `merge_reports` made them, and
        returns what is known with it: what every rank has ended, each request once, and the report's figures.

        Every rank's reports are needed, each as it comes; their order does not matter. One that comes again ends
        nothing twice; one of a rank that the engine has not (`tp_size`, `pp_size`) raises `InvalidArgumentError`.
        """
        outcome = self._handle.ask("report", _lib.data("a report", report))
        return cast(OutcomeDict, _wire.decode_outcome(outcome))

    def note(self, report: bytes) -> None:
        """As `report`, for hosts that know by themselves what all ranks have ended: the outcome is not made."""
        self._handle.call("report", _lib.data("a report", report), _lib.load().ffi.NULL)

    def over(self, request: str, side: Literal["sending", "recving"]) -> None:
        """Every rank is done with a request on that side, as the host knows by its own count.

        It is over then, also where the ranks' reports come later or never. One that is over already, or not known, is
        no error. Its id must not be used again before the reports have come, which would count for the new request.
        """
        self._handle.call("over", _lib.text("a request id", request), _lib.constant(SIDES, "side", side))

    def forget_histories(self, most: int | None = None) -> int:
        """Evicts the `most` oldest conversations that are kept for their next turns, by default of all.

        For hosts that need their blocks, or whose weights have changed. Their blocks may be used again when reports say
        that their sending is over. Returns how many evicted ones, now or earlier, have blocks that are not free yet.
        """
        count = _lib.new("uint64_t *")
        self._handle.call("forget_histories", _lib.whole("most", 2**64 - 1 if most is None else most), count)
        return int(count[0])

    def stats(self) -> dict[str, object]:
        """Counters since the start, and gauges; `kvferry.stats.metrics` tells what each is."""
        return _wire.unpack_map("stats", self._handle.ask("stats"))

    def shutdown(self) -> None:
        """Stops the listener and frees the scheduler. Calling it again does nothing."""
        self._handle.free()

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _of(request: str, params: Params) -> tuple[bytes, bytes]:
    packed = params if isinstance(params, bytes) else _wire.pack("kv_transfer_params", params)
    return _lib.text("a request id", request), packed


def _rank_list(ranks: Mapping[tuple[int, int], bytes]) -> tuple[Any, list[Any]]:
    """The ranks' metadata as a C array, and what must live as long as it."""
    ffi = _lib.load().ffi
    if not isinstance(ranks, Mapping):
        raise invalid(f"ranks must map (pp_rank, tp_rank) to metadata, not {type(ranks).__name__}")
    for rank in ranks:
        if not isinstance(rank, tuple) or len(rank) != 2:
            raise invalid(f"ranks: the key {rank!r} must be a pair (pp_rank, tp_rank)")
    blobs = ffi.new("kvf_rank_metadata[]", len(ranks))
    keep = []
    for blob, ((pp, tp), metadata) in zip(blobs, ranks.items(), strict=True):
        data = ffi.from_buffer(_lib.data(f"the metadata of rank (pp {pp}, tp {tp})", metadata))
        keep.append(data)
        try:
            blob.pp_rank, blob.tp_rank = pp, tp
        except (TypeError, OverflowError) as error:
            raise invalid(f"ranks must be integers from 0: {error}") from error
        blob.data, blob.len = ffi.cast("uint8_t *", data), len(data)
    return blobs, keep
