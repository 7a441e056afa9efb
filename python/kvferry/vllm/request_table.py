"""The scheduler side's records of its requests: one each.

A request with a hand-over gets its record when it arrives. The record is removed when vLLM forgets the request: at its
end, or with the workers' report if its blocks are kept until then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .. import _wire
from .request_ids import library_id


@dataclass(eq=False, slots=True)
class PrefillChunks:
    """The progress of a prefill that decode engines may await. `ChunkReporter` keeps it.

    Attributes:
        tokens: Tokens of its prompt.
        blocks: Its block ids so far, by transferred KV-cache group.
        written_tokens: Tokens that the steps so far write.
        running: Whether it is still computed.
        open: Whether its progress is still reported to the library.
        reported: Whether the library knows of blocks of it.
    """

    tokens: int
    blocks: tuple[list[int], ...] = ()
    written_tokens: int = 0
    running: bool = True
    open: bool = True
    reported: bool = False


@dataclass(eq=False, slots=True)
class RequestRecord:
    """Everything that the scheduler side knows of one request.

    Attributes:
        vllm_id: vLLM's id.
        id: The id in the library and the log, from `request_ids.library_id`.
        prefill: The params that ask for the prompt's cache to be kept; None if none do.
        name: The name by which decode engines may await the prefill.
        digest: The digest of the prefill's prompt, from `history.fingerprint`.
        chunks: How far the prefill is, if decode engines may read it meanwhile.
        load: The params that name the engine to load from, in this connector's words; None if nothing is loaded.
        other_prompt: Whether `load` is for another prompt. Its lease is another request's then.
        history_tokens: How many tokens the prompt has in common with the conversation that a decode engine keeps.
        refusal: Why nothing can be loaded.
        allocated: Whether the library knows which blocks are loaded, or that none are. It loads once.
        match: The last question of how many tokens can be loaded (prompt tokens, computed tokens), and its answer.
        unreported: Whether the workers still have to report the refused load as failed.
        ended: Whether the request has ended, and vLLM keeps its blocks until the workers have reported it.
        conversation: Whether these blocks are kept for the conversation's next turn.
    """

    vllm_id: str
    id: str
    prefill: Mapping[str, Any] | None = None
    name: str | None = None
    digest: str | None = None
    chunks: PrefillChunks | None = None
    load: Mapping[str, Any] | None = None
    other_prompt: bool = False
    history_tokens: int | None = None
    refusal: str | None = None
    allocated: bool = False
    match: tuple[tuple[int, int], tuple[int, bool]] | None = None
    unreported: bool = False
    ended: bool = False
    conversation: bool = False
    _packed: bytes | None = None

    def packed_load(self) -> bytes:
        """`load` as the library takes it, packed once. Raises `InvalidArgumentError` for what cannot be packed."""
        if self._packed is None:
            self._packed = _wire.pack("kv_transfer_params", self.load or {})
        return self._packed


class RequestTable:
    """The records of one engine, by vLLM's request ids, and which ids its workers have to know.

    Workers report requests by the library's ids. Where that is not vLLM's, they know vLLM's for as long as there is a
    record.
    """

    def __init__(self) -> None:
        self._records: dict[str, RequestRecord] = {}
        self._long_ids: dict[str, str | None] = {}
        self.conversations = 0
        """Conversations whose blocks are not free yet."""

    def get(self, vllm_id: str) -> RequestRecord | None:
        """Returns the record of a request; None if it has none."""
        return self._records.get(vllm_id)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def create(self, vllm_id: str) -> RequestRecord:
        """Makes the record of a request that has arrived. It takes the place of one that still waits for its report."""
        if (former := self._records.get(vllm_id)) is not None:
            self._remove(former)
        record = self._records[vllm_id] = RequestRecord(vllm_id, library_id(vllm_id))
        if record.id != vllm_id:
            self._change_long_id(record.id, vllm_id)
        return record

    def end(self, record: RequestRecord, kept: bool, conversation: bool = False) -> None:
        """Ends a request; `kept`: vLLM keeps it until the workers have reported it."""
        if kept:
            record.ended, record.conversation = True, conversation
            self.conversations += conversation
        else:
            self._remove(record)

    def reported(self, record: RequestRecord) -> None:
        """Notes that all workers have reported a request, which is over if it has ended."""
        if record.ended:
            self._remove(record)

    def take_long_ids(self) -> Mapping[str, str | None]:
        """Takes the changes for the workers: vLLM's ids by the library's, None for those that they may forget."""
        taken, self._long_ids = self._long_ids, {}
        return taken

    def _remove(self, record: RequestRecord) -> None:
        del self._records[record.vllm_id]
        self.conversations -= record.conversation
        if record.id != record.vllm_id:
            self._change_long_id(record.id, None)

    def _change_long_id(self, own: str, vllm_id: str | None) -> None:
        # The workers have not heard of the change before, which this one takes back.
        if own in self._long_ids:
            del self._long_ids[own]
        else:
            self._long_ids[own] = vllm_id
