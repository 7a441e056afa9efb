"""The connector's half in the scheduler's process: asks `kvferry.Scheduler` and converts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

import kvferry

from . import bootstrap, dialects, history, pause
from .config import Options
from .geometry import TokenShare, transfer_groups
from .host_buffer import CopyList
from .log import logger
from .metadata import KvferryConnectorMetadata, KvferryHandshakeMetadata, KvferryWorkerMetadata, RefusedLoad
from .prefill_chunks import ChunkReporter
from .request_table import RequestRecord, RequestTable
from .stats import KvferryStats
from .support import check_multi_turn, check_served, has_host_buffer, writes_late

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
"""The ends of a prefill whose blocks are worth handing over."""


def _params_with(request: Request, key: str) -> Mapping[str, Any] | None:
    """Returns the request's `kv_transfer_params` if they ask for `key`. A value that is neither true nor false is left
    for `kvferry.Scheduler` to refuse by name.

    The samples of one prompt all carry the same params and come one after another; how many is not known here."""
    params: Any = request.kv_transfer_params
    if not params or not isinstance(params, Mapping) or params.get(key) in (None, False):
        return None
    return {**params, "shared": True} if dialects.SAMPLE.match(request.request_id) else params


def _names_history(record: RequestRecord) -> bool:
    """Tells whether a prefill's params name a decode engine that has the conversation so far."""
    return record.prefill is not None and record.prefill.get("remote_block_ids") is not None


def _processed_tokens(request: Request) -> int:
    """Returns how many tokens' cache is there, without steps in flight, which go on behind the request's end."""
    return max(0, min(int(request.num_computed_tokens - request.num_in_flight_tokens), len(request.all_token_ids)))


def _drop_last_token(request: Request) -> None:
    """Takes the last token off a new request's prompt, as vLLM's NIXL connector does. Nothing is taken
    from a prompt of one token, and from one whose log-probabilities are asked for: the decode engine computes all of
    that one itself."""
    if request.num_prompt_tokens < 2 or request.get_skip_reading_prefix_cache():
        return
    # A prompt may have ids for some tokens and embeddings for the others, both as long as the prompt. With an engine
    # core in the caller's process these are the caller's own, so they are replaced; vLLM reads `_all_token_ids` through
    # a view.
    for part in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        if (value := getattr(request, part)) is not None:
            setattr(request, part, value[:-1])
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    # The hash of a last block that is full with the whole prompt stays behind: no other token may get into it.
    request.max_tokens = 1


class SchedulerSide:
    """Does the work of `KvferryConnector` in the scheduler's process. All calls come from the engine core's thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        check_served(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        self._kv_cache_config = kv_cache_config
        self._loads: bool = transfer.is_kv_consumer
        self._sends: bool = transfer.is_kv_producer
        self._fails_load_errors: bool = transfer.kv_load_failure_policy == "fail"
        self._requests = RequestTable()
        # For the next step, by vLLM's request ids.
        self._refused_loads: dict[str, RefusedLoad] = {}
        # Since the last `take_stats`.
        self._local_requests = 0
        self._counts = options.telemetry
        # Whether the next step grants leases.
        self._granted = False
        # Whether a call since the last step may have given the library work for the workers. Nothing else does.
        self._may_have_work = False
        self._multi_turn = options.multi_turn
        self._push_dialect = options.push_dialect and self._sends
        self._parallel, self._options = parallel, options
        self._bootstrap: bootstrap.Announcement | None = None
        self._engine_id: str = transfer.engine_id
        # Whether the last request that could have run was given no blocks.
        self._lacks_blocks = False
        # Whether the ranks' metadata is known. After a sleep it is given again, of new workers.
        self._is_served = False
        # A block stands for the same number of tokens on every rank.
        groups = transfer_groups(kv_cache_config, TokenShare(parallel.decode_context_parallel_size))
        # A decode engine that has the whole prompt computes its last token again, for its logits. That token looks one
        # token further back than vLLM keeps a window for, and a state must not have it in it already. So models with
        # either hand over all but the last token, and the prefill engine stops in front of it.
        windows = any(isinstance(group["kind"], dict) for group in groups)
        # Windows or chunks: the cache in front of them is gone.
        self._windows = windows
        self._has_state = any(group["kind"] == "state" for group in groups)
        # Whether the engine is to have no requests left, so that no conversation is kept.
        self._paused = False
        if self._multi_turn:
            check_multi_turn(vllm_config, self._has_state)
            pause.watch()
        self._holds_back = windows or self._has_state
        self._late = writes_late(vllm_config, self._has_state)
        self._copies = CopyList() if has_host_buffer(vllm_config) else None
        # After how many tokens a group begins a new block with its state; None for groups of tokens.
        self._state_spans = [
            group.kv_cache_spec.block_size if stated["kind"] == "state" else None
            for group, stated in zip(kv_cache_config.transfer_groups, groups, strict=True)
        ]
        self._scheduler = kvferry.Scheduler(
            {
                "engine_id": transfer.engine_id,
                "tp_size": parallel.tensor_parallel_size,
                "pp_size": parallel.pipeline_parallel_size,
                "dcp_size": parallel.decode_context_parallel_size,
                "groups": groups,
                # Block 0 is the one that vLLM never hands out.
                "null_block": 0,
                "reuses_blocks": bool(vllm_config.cache_config.enable_prefix_caching),
                "num_blocks": kv_cache_config.num_blocks,
                "written_late": self._late,
                "data_parallel_index": parallel.data_parallel_index,
                **options.scheduler,
            }
        )
        drafts = vllm_config.speculative_config is not None
        self._chunks = ChunkReporter(self._scheduler, self._requests, self._transferred, drafts)

    def serve(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Takes all ranks' metadata and, on an engine that sends, starts the handshake listener.

        The workers of an engine that receives learn from it what their fellow ranks hold, to divide the reading.

        Called again when the engine wakes up, with the metadata of new workers."""
        ranks: dict[tuple[int, int], bytes] = {}
        for rank, entry in metadata.items():
            if not isinstance(entry, KvferryHandshakeMetadata):
                raise TypeError(
                    f"rank {rank} sent handshake metadata of type {type(entry).__name__}, not KvferryConnector's. "
                    "MultiConnector passes on only the first child's that has some: put KvferryConnector first"
                )
            ranks[rank] = entry.rank_metadata
        self._may_have_work = True
        if self._is_served:
            self._scheduler.renew(ranks)
            logger.info("The workers of all %d ranks were started anew", len(ranks))
            return
        if not self._sends and not self._multi_turn:
            # No peer asks an engine that only receives.
            self._scheduler.set_engine(ranks)
        else:
            host, port = self._scheduler.serve(ranks)
            logger.info("Serving the handshake metadata of %d ranks at %s port %d", len(ranks), host, port)
            if self._sends and self._options.bootstrap_port is not None:
                named = dialects.addressed_id(self._engine_id, host, port)
                self._bootstrap = bootstrap.announce(self._parallel, self._options, named)
        self._is_served = True

    # --- requests

    def arrived(self, request: Request) -> None:
        """Notes a new request: if its prompt was prefilled elsewhere, the workers connect and keep the lease."""
        prefill, load = _params_with(request, "do_remote_decode"), _params_with(request, "do_remote_prefill")
        record = self._requests.create(request.request_id) if prefill or load else None
        if record is not None:
            record.prefill = prefill
            if prefill and self._sends:
                self._note_prefill(record, request, prefill)
            record.load = self._to_load(record, request, load)
        keeps, loads = prefill and self._sends, record and record.load and self._loads
        if not keeps and not loads and not request.abort_immediately:
            # A hand-over that was meant fails nowhere, so that only this figure shows it.
            self._local_requests += self._counts
        if record is None or record.load is None or record.other_prompt:
            return
        if not self._loads:
            logger.warning(
                "Request %s has do_remote_prefill, but kv_role is kv_producer: its prompt is computed here", record.id
            )
        try:
            if _names_history(record):
                record.history_tokens = history.in_common(request, record.load, whole=self._windows)
            self._may_have_work = True
            self._scheduler.arrived(record.id, record.packed_load())
        except kvferry.KvferryError as error:
            self._refuse(record, request, error)

    def _note_prefill(self, record: RequestRecord, request: Request, params: Mapping[str, Any]) -> None:
        """Notes a prompt that is computed here for a decode engine."""
        record.digest = history.fingerprint(request)
        if record.digest is None:
            logger.warning_once("Prompts with media are not handed over: %s", dialects.NO_DIGEST)
        record.name = dialects.name_of_prefill(request, params, record.digest, self._late)
        if self._holds_back:
            _drop_last_token(request)
        if record.name is not None and self._copies is None:
            # A host buffer has nothing of it before its end.
            self._chunks.track(record, request.num_prompt_tokens)

    def _to_load(
        self, record: RequestRecord, request: Request, params: Mapping[str, Any] | None
    ) -> Mapping[str, Any] | None:
        """Returns the params that name the engine with the prompt, or its beginning, in this connector's words."""
        if self._multi_turn and _names_history(record):
            return record.prefill
        if params is None:
            return None
        try:
            understood = dialects.understood(request, params)
        except kvferry.KvferryError as error:
            self._refuse(record, request, error)
            record.other_prompt = True
            return params
        if not understood and not request.abort_immediately:
            logger.warning_once(
                "The second and later prompts of a completion are computed here, because the prefill engine's "
                "answer is to the first. Send prompts one by one, or ask both engines at once"
            )
        return understood or None

    def matched_tokens(self, request: Request, computed_tokens: int) -> tuple[int, bool]:
        """Returns how many tokens beyond `computed_tokens` are loaded, and whether between steps.

        vLLM asks in every step in which the request could start. The library is asked once, and anew where a prefix of
        another length is computed."""
        self._lacks_blocks = True
        record = self._requests.get(request.request_id)
        if record is None or record.load is None or record.allocated or not self._loads:
            return 0, False
        question = (self._handed_over(record, request), computed_tokens)
        if record.match is None or record.match[0] != question:
            record.match = question, self._match(record, record.load, request, *question)
        return record.match[1]

    def _match(
        self, record: RequestRecord, params: Mapping[str, Any], request: Request, tokens: int, computed_tokens: int
    ) -> tuple[int, bool]:
        if params.get("do_remote_decode") and request.get_skip_reading_prefix_cache():
            # All log-probabilities take all of the prompt.
            return 0, False
        if self._has_state and (request.num_prompt_tokens < 2 or request.get_skip_reading_prefix_cache()):
            # The state before the only token is empty, and all log-probabilities take all of the prompt.
            return 0, False
        if record.refusal is None:
            try:
                return self._scheduler.matched(record.id, record.packed_load(), tokens, computed_tokens)
            except kvferry.KvferryError as error:
                self._refuse(record, request, error)
        # Under the policy "fail" vLLM must see the refused load fail; otherwise the prompt is computed here.
        fails = self._fails_load_errors and not params.get("do_remote_decode")
        tokens = request.num_prompt_tokens - computed_tokens if fails else 0
        return (tokens, True) if tokens > 0 else (0, False)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Takes allocated blocks: the load fills those without a hash."""
        self._lacks_blocks = False
        record = self._requests.get(request.request_id)
        if record is None or record.load is None or record.allocated:
            return
        fill = self._to_fill(blocks, request.num_prompt_tokens - 1) if external_tokens else ()
        if record.refusal is None:
            try:
                groups: Sequence[Sequence[int]] = fill or [()] * len(self._kv_cache_config.transfer_groups)
                tokens = self._handed_over(record, request)
                self._may_have_work = True
                self._scheduler.allocated(record.id, record.packed_load(), groups, tokens, external_tokens)
                record.allocated = True
                if fill and self._copies is not None:
                    self._copies.fill(record.vllm_id, fill)
                return
            except kvferry.KvferryError as error:
                self._refuse(record, request, error)
        if external_tokens:
            assert record.refusal is not None
            flat = tuple(block for group in fill for block in group)
            self._refused_loads[record.vllm_id] = RefusedLoad(record.refusal, flat)
            record.unreported = True

    def finished(self, request: Request, blocks: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request. Returns whether to keep its blocks, and the params for the decode engine; empty ones of a
        prefill that leaves it nothing to load."""
        record = self._requests.get(request.request_id)
        if record is None:
            return False, None
        keep, answer = self._finished(record, request, blocks)
        self._chunks.end(record, bool(answer))
        self._requests.end(record, keep, conversation=history.KEY in (answer or ()))
        return keep, answer

    def _finished(
        self, record: RequestRecord, request: Request, blocks: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        params = record.prefill or record.load
        if params is None:
            return False, None
        if record.other_prompt:
            # The lease is another request's.
            return record.unreported, None
        complete = request.status in COMPLETE
        # The answer of a complete prefill that hands nothing over. Some proxies take null for a failure.
        nothing: dict[str, Any] | None = {} if complete and params.get("do_remote_decode") else None
        if complete and self._has_state and request.get_skip_reading_prefix_cache():
            # The whole prompt was computed (see `_drop_last_token`), and its state is of no use to a decode engine.
            complete = False
        if complete and not self._sends and record.prefill is not None:
            # vLLM may already have given away the blocks of a request that a consumer finishes after a preemption.
            logger.warning("Request %s has do_remote_decode, but kv_role is kv_consumer: nothing is kept", record.id)
            complete = False
        if params.get("do_remote_decode") and record.digest is None:
            # A decode engine could not tell whether it is its own prompt.
            complete = False
        tokens, digests = request.num_computed_tokens, None
        if self._multi_turn and complete and record.prefill is None:
            tokens = _processed_tokens(request)
            digests = history.describe(request, tokens)
            # Without digests, the prefill engine of the next turn could not tell what the blocks hold.
            complete = digests is not None and not self._paused
        outcome = "complete" if complete else "aborted"
        groups = self._with_state(self._transferred(blocks), tokens)
        try:
            keep, answer = self._end(record, params, outcome, groups, tokens)
        except kvferry.KvferryError as error:
            if record.refusal is None:
                logger.error("Request %s: its kv_transfer_params are unusable, nothing is kept: %s", record.id, error)
            return record.unreported, None
        if answer is not None and digests is not None:
            answer[history.KEY] = digests
        if answer is not None and params.get("do_remote_decode"):
            if self._copies is not None:
                self._copies.save(groups)
            if record.digest is not None:
                answer[dialects.PROMPT] = record.digest
            if self._push_dialect:
                dialects.as_push(answer)
        self._granted |= answer is not None
        # vLLM must know the request still when its refused load is reported.
        return keep or record.unreported, nothing if answer is None else answer

    def _end(
        self, record: RequestRecord, params: Mapping[str, Any], outcome: Any, groups: Any, tokens: int
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tells the library of a request's end, of a prefill with the name by which decode engines may await it."""

        def finished(params: Mapping[str, Any] | bytes) -> tuple[bool, dict[str, Any] | None]:
            return self._scheduler.finished(record.id, params, outcome, groups, tokens)

        self._may_have_work = True
        name = record.name
        if name is None:
            return finished(record.packed_load() if params is record.load else params)
        # A decode engine that awaits a prefill that ends early may get another one of the same name, which still runs.
        if outcome == "aborted" and any(
            other.name == name and not other.ended and other is not record for other in self._requests
        ):
            return finished({**params, "transfer_id": None})
        try:
            return finished({**params, "transfer_id": name})
        except kvferry.AlreadyExistsError:
            if params.get("transfer_id") is not None:
                raise
            # A prefill of the same prompt is kept under this name, which serves the decode engines that await it. An
            # answer with a name in place of blocks needs one of its own, as the decode engine makes it of the answer.
            unique = dialects.name_of(record.vllm_id, record.digest)
            return finished({**params, "transfer_id": unique} if self._late else params)

    def _handed_over(self, record: RequestRecord, request: Request) -> int:
        """Returns how many of the prompt's tokens the prefill engine computes, but for the one that `kvferry.Scheduler`
        itself leaves out where there is a state. For a conversation, how many of its tokens a decode engine has."""
        if record.history_tokens is not None:
            return record.history_tokens
        tokens = int(request.num_prompt_tokens)
        return tokens - 1 if self._holds_back and not self._has_state and tokens > 1 else tokens

    def _refuse(self, record: RequestRecord, request: Request, error: kvferry.KvferryError) -> None:
        if record.refusal is None:
            record.refusal, record.match = str(error), None
            if request.abort_immediately:
                # No client knows its id. The request itself has failed for a reason of its own.
                return
            computed = _names_history(record) or not self._fails_load_errors
            outcome = "its prompt is computed here" if computed else "it fails"
            logger.error(
                "Request %s: its prompt cannot be loaded from another engine, %s: %s", record.id, outcome, error
            )

    def _to_fill(self, blocks: KVCacheBlocks, tokens: int) -> tuple[list[int], ...]:
        """Returns the blocks that a load fills: of tokens those without a hash, of a state the one after `tokens`."""
        unhashed = self._transferred(blocks.get_unhashed_block_ids_all_groups())
        if not self._has_state:
            return unhashed
        states = self._with_state(self._transferred(blocks.get_block_ids()), tokens)
        return tuple(
            ids if span is None else state for ids, state, span in zip(unhashed, states, self._state_spans, strict=True)
        )

    def _with_state(self, groups: tuple[list[int], ...], tokens: int) -> tuple[list[int], ...]:
        """Cuts groups with a state down to the block with the state after `tokens` tokens.

        A block list has a block for every span of tokens, most of them null: vLLM keeps the state of the last one
        only, and may keep further blocks behind it, for speculative tokens. Without prefix caching a span is as long as
        a request can be."""
        if not self._has_state or not groups:
            return groups
        return tuple(
            ids if span is None else ids[(at := max(tokens - 1, 0) // span) : at + 1]
            for ids, span in zip(groups, self._state_spans, strict=True)
        )

    def _transferred(self, blocks: Sequence[list[int]]) -> tuple[list[int], ...]:
        selected: tuple[list[int], ...] = self._kv_cache_config.select_transfer_block_ids(blocks)
        return selected

    # --- steps

    def build_step(self, output: SchedulerOutput | None = None) -> KvferryConnectorMetadata:
        """Returns the work of this engine step, which computes what `output` says. Cheap without work."""
        if self._lacks_blocks and self._multi_turn:
            # A request waits that could have run: one conversation is evicted per step until there is room for it.
            self.make_room()
        self._lacks_blocks = False
        refused, self._refused_loads = self._refused_loads, {}
        step = self._scheduler.step() if self._has_work() else b""
        copies = self._copies.take() if self._copies is not None else None
        mark, long_ids = self._chunks.step(output), self._requests.take_long_ids()
        metadata = KvferryConnectorMetadata(step, refused, self._granted, mark, copies, long_ids)
        # Work that one step did not hold comes with the next.
        self._granted = self._granted and self._has_work()
        return metadata

    def make_room(self) -> bool:
        """Evicts the oldest conversation. Returns whether blocks of this or of an earlier one will be free soon."""
        if not self._requests.conversations:
            return False
        self._may_have_work = True
        return self._scheduler.forget_histories(1) > 0

    def forget_histories(self) -> None:
        """Evicts all conversations."""
        self._may_have_work = True
        self._scheduler.forget_histories()

    def pause(self, paused: bool) -> None:
        """Notes that the engine is to have no requests left, or goes on."""
        self._paused = paused
        if paused:
            self.forget_histories()

    def has_pending(self) -> bool:
        """Returns whether an engine step is needed to hand out work, even if no request is left."""
        return bool(self._refused_loads) or self._has_work()

    def _has_work(self) -> bool:
        """Returns whether the library has work for the next step."""
        self._may_have_work = self._may_have_work and self._scheduler.has_pending()
        return self._may_have_work

    def update(self, output: KVConnectorOutput) -> None:
        """Takes in the reports of all ranks of one step, and which requests vLLM counts as finished by all ranks.

        Either tells that a request is over, and may come first: vLLM frees a request's blocks by its own ids, so a
        request that it has freed is over here too. The later one changes nothing. vLLM gets the ids, failures and
        figures from its own channels."""
        metadata = output.kv_connector_worker_meta
        if metadata is not None:
            if not isinstance(metadata, KvferryWorkerMetadata):
                raise TypeError(f"expected worker metadata of KvferryConnector, got {type(metadata).__name__}")
            # First, because a report may say that a prefill is not kept any more.
            if metadata.step_mark:
                self._chunks.confirm(metadata.step_mark)
            for report in metadata.reports:
                self._scheduler.note(report)
        # Requests without a record are those of other connectors.
        for request in output.finished_sending or ():
            if (record := self._requests.get(request)) is not None:
                self._chunks.forget(record)
                self._scheduler.over(record.id, "sending")
                self._requests.reported(record)
        for request in output.finished_recving or ():
            if (record := self._requests.get(request)) is not None:
                if not record.unreported:
                    self._scheduler.over(record.id, "recving")
                # The library has refused it otherwise: it may not even take the id.
                record.unreported = False
                self._requests.reported(record)

    def take_stats(self) -> KvferryStats | None:
        """Takes the figures since the last call, None if there are none."""
        if not self._local_requests:
            return None
        taken, self._local_requests = self._local_requests, 0
        return KvferryStats({"local_requests": taken})

    def shutdown(self) -> None:
        """Stops the handshake listener. May be called again."""
        if self._bootstrap is not None:
            self._bootstrap.close()
        self._scheduler.shutdown()
