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
from .request_ids import LongIds, library_id
from .stats import KvferryStats
from .support import check_multi_turn, check_served, has_host_buffer, writes_late
from .under_way import Progress

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
"""How a prefill ends whose blocks are worth handing over."""


def _wants(request: Request, key: str) -> Mapping[str, Any] | None:
    """The request's `kv_transfer_params` if they ask for `key`. What is neither true nor false is left for
    `kvferry.Scheduler` to refuse by name.

    The samples of one prompt all carry the same params and come one after another; how many is not known here."""
    params: Any = request.kv_transfer_params
    if not params or not isinstance(params, Mapping) or params.get(key) in (None, False):
        return None
    return {**params, "shared": True} if dialects.SAMPLE.match(request.request_id) else params


def _names_history(request: Request) -> bool:
    """Whether a prefill is told which decode engine has the conversation so far."""
    params = _wants(request, "do_remote_decode")
    return params is not None and params.get("remote_block_ids") is not None


def _processed_tokens(request: Request) -> int:
    """The tokens whose cache is there, without those of steps in flight, which go on behind the request's end."""
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
    """What `KvferryConnector` does in the scheduler's process. All calls come from the engine core's thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        check_served(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        self._kv_cache_config = kv_cache_config
        self._loads: bool = transfer.is_kv_consumer
        self._sends: bool = transfer.is_kv_producer
        self._long_ids = LongIds()
        self._fails_load_errors: bool = transfer.kv_load_failure_policy == "fail"
        self._refusals: dict[str, str] = {}
        self._refused_loads: dict[str, RefusedLoad] = {}
        # Since the last `take_stats`.
        self._local_requests = 0
        self._counts = options.telemetry
        # Requests of refused loads that the workers have not reported yet.
        self._unreported: set[str] = set()
        # Whether the next step grants leases.
        self._granted = False
        self._multi_turn = options.multi_turn
        self._push_dialect = options.push_dialect and self._sends
        # What decode requests were given, in this connector's words; and those whose params are for another prompt.
        self._understood: dict[str, Mapping[str, Any]] = {}
        self._others: set[str] = set()
        # Of prefills: by which name decode engines may await them, and a digest of the prompt.
        self._prefills: dict[str, tuple[str | None, str | None]] = {}
        self._parallel, self._options = parallel, options
        self._bootstrap: bootstrap.Announcement | None = None
        self._engine_id: str = transfer.engine_id
        # Looked up for a load, and not given blocks so far.
        self._wants_blocks = False
        # Of prefills whose conversation a decode engine has so far: how many tokens of that they begin with.
        self._histories: dict[str, int] = {}
        # Whether the ranks' metadata is known. After a sleep it is given again, of new workers.
        self._is_served = False
        # Which of the ranks this is makes no difference to how many tokens a block stands for.
        groups = transfer_groups(kv_cache_config, TokenShare(parallel.decode_context_parallel_size))
        # A decode engine that has the whole prompt computes its last token again, for its logits. That token looks one
        # token further back than vLLM keeps a window for, and a state must not have it in it already. So models with
        # either hand over all but the last token, and the prefill engine stops in front of it.
        windows = any(isinstance(group["kind"], dict) for group in groups)
        # Windows or chunks: what is in front of them is not there.
        self._windows = windows
        self._has_state = any(group["kind"] == "state" for group in groups)
        # No conversation is kept while the engine is to have nothing left to do.
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
        # Portions have nothing of states.
        drafts = vllm_config.speculative_config is not None
        self._progress = Progress(self._scheduler, self._transferred, drafts)

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
        if self._is_served:
            self._scheduler.renew(ranks)
            logger.info("The workers of all %d ranks were started anew", len(ranks))
            return
        if not self._sends and not self._multi_turn:
            # Nobody asks an engine that only receives.
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
        """A new request: if its prompt was prefilled elsewhere, the workers connect and keep the lease."""
        asked = _wants(request, "do_remote_decode") if self._sends else None
        if asked:
            digest = history.fingerprint(request)
            if digest is None:
                logger.warning_once("Prompts with media are not handed over: %s", dialects.NO_DIGEST)
            name = dialects.name_of_prefill(request, asked, digest, self._late)
            self._prefills[request.request_id] = name, digest
            if self._holds_back:
                _drop_last_token(request)
            if name is not None and self._copies is None:
                # What is under way is on the device only.
                self._progress.add(request.request_id, name, request.num_prompt_tokens)
        params = self._to_load(request)
        if not asked and (params is None or not self._loads) and not request.abort_immediately:
            # Where a hand-over was meant, nothing else tells: nothing fails.
            self._local_requests += self._counts
        if params is None or request.request_id in self._others:
            return
        if not self._loads:
            logger.warning(
                "Request %s has do_remote_prefill, but kv_role is kv_producer: its prompt is computed here",
                library_id(request.request_id),
            )
        try:
            if _names_history(request):
                self._histories[request.request_id] = history.in_common(request, params, whole=self._windows)
            self._scheduler.arrived(self._long_ids.of(request.request_id), params)
        except kvferry.KvferryError as error:
            self._refuse(request, error)

    def _to_load(self, request: Request) -> Mapping[str, Any] | None:
        """The params of a request whose prompt, or the beginning of it, another engine has."""
        if self._multi_turn and _names_history(request):
            return _wants(request, "do_remote_decode")
        known = self._understood.get(request.request_id)
        if known is None and (params := _wants(request, "do_remote_prefill")) is not None:
            try:
                known = dialects.understood(request, params)
                if not known and not request.abort_immediately:
                    logger.warning_once(
                        "The second and later prompts of a completion are computed here, because the prefill engine's "
                        "answer is to the first. Send prompts one by one, or ask both engines at once"
                    )
            except kvferry.KvferryError as error:
                self._refuse(request, error)
                self._others.add(request.request_id)
                known = params
            self._understood[request.request_id] = known
        return known or None

    def matched_tokens(self, request: Request, computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond `computed_tokens` are loaded, and whether between steps."""
        self._wants_blocks = True
        params = self._to_load(request)
        if params is None or not self._loads:
            return 0, False
        if params.get("do_remote_decode") and request.get_skip_reading_prefix_cache():
            # All log-probabilities take all of the prompt.
            return 0, False
        if self._has_state and (request.num_prompt_tokens < 2 or request.get_skip_reading_prefix_cache()):
            # The state before the only token is empty, and all log-probabilities take all of the prompt.
            return 0, False
        if request.request_id not in self._refusals:
            try:
                tokens = self._handed_over(request)
                return self._scheduler.matched(library_id(request.request_id), params, tokens, computed_tokens)
            except kvferry.KvferryError as error:
                self._refuse(request, error)
        # A load that cannot be: under the policy "fail" vLLM must see it fail, otherwise the prompt is computed here.
        fails = self._fails_load_errors and not params.get("do_remote_decode")
        tokens = request.num_prompt_tokens - computed_tokens if fails else 0
        return (tokens, True) if tokens > 0 else (0, False)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Blocks are allocated: those without a hash yet are the ones to fill."""
        self._wants_blocks = False
        params = self._to_load(request)
        if params is None:
            return
        request_id = request.request_id
        fill = self._to_fill(blocks, request.num_prompt_tokens - 1) if external_tokens else ()
        if request_id not in self._refusals:
            try:
                groups: Sequence[Sequence[int]] = fill or [()] * len(self._kv_cache_config.transfer_groups)
                own = self._long_ids.of(request_id)
                self._scheduler.allocated(own, params, groups, self._handed_over(request), external_tokens)
                if fill and self._copies is not None:
                    self._copies.fill(request_id, fill)
                return
            except kvferry.KvferryError as error:
                self._refuse(request, error)
        if external_tokens:
            flat = tuple(block for group in fill for block in group)
            self._refused_loads[request_id] = RefusedLoad(self._refusals[request_id], flat)
            self._unreported.add(request_id)

    def finished(self, request: Request, blocks: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: whether to keep its blocks, and the params for the decode engine; empty ones of a prefill
        that leaves it nothing to load."""
        request_id = request.request_id
        params = _wants(request, "do_remote_decode") or self._to_load(request)
        self._understood.pop(request_id, None)
        name, digest = self._prefills.pop(request_id, (None, None))
        keep, answer = self._finished(request, blocks, params, name, digest)
        self._progress.end(request_id, bool(answer))
        self._long_ids.end(request_id, keep)
        return keep, answer

    def _finished(
        self,
        request: Request,
        blocks: Sequence[list[int]],
        params: Mapping[str, Any] | None,
        name: str | None,
        digest: str | None,
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        if params is None:
            return False, None
        refused = self._refusals.pop(request_id, None)
        if request_id in self._others:
            # The lease is another request's.
            self._others.discard(request_id)
            return request_id in self._unreported, None
        self._histories.pop(request_id, None)
        complete = request.status in COMPLETE
        # Of a prefill that has ended well. Some proxies take null for a failure.
        nothing: dict[str, Any] | None = {} if complete and params.get("do_remote_decode") else None
        if complete and self._has_state and request.get_skip_reading_prefix_cache():
            # The whole prompt was computed (see `_drop_last_token`), and its state is of no use to a decode engine.
            complete = False
        if complete and not self._sends and _wants(request, "do_remote_decode"):
            # vLLM may already have given away the blocks of a request that a consumer finishes after a preemption.
            logger.warning(
                "Request %s has do_remote_decode, but kv_role is kv_consumer: nothing is kept", library_id(request_id)
            )
            complete = False
        if params.get("do_remote_decode") and digest is None:
            # Nobody could tell whether it is the prompt of whoever asks for it.
            complete = False
        tokens, digests = request.num_computed_tokens, None
        if self._multi_turn and complete and not _wants(request, "do_remote_decode"):
            tokens = _processed_tokens(request)
            digests = history.describe(request, tokens)
            # Without them, the prefill engine of the next turn could not tell what the blocks hold.
            complete = digests is not None and not self._paused
        outcome = "complete" if complete else "aborted"
        groups = self._with_state(self._transferred(blocks), tokens)
        try:
            keep, answer = self._end(request_id, params, (name, digest), outcome, groups, tokens)
        except kvferry.KvferryError as error:
            if refused is None:
                logger.error(
                    "Request %s: its kv_transfer_params are unusable, nothing is kept: %s",
                    library_id(request_id),
                    error,
                )
            return request_id in self._unreported, None
        if answer is not None and digests is not None:
            answer[history.KEY] = digests
        if answer is not None and params.get("do_remote_decode"):
            if self._copies is not None:
                self._copies.save(groups)
            if digest is not None:
                answer[dialects.PROMPT] = digest
            if self._push_dialect:
                dialects.as_push(answer)
        self._granted |= answer is not None
        # vLLM must know the request still when its refused load is reported.
        return keep or request_id in self._unreported, nothing if answer is None else answer

    def _end(
        self,
        request_id: str,
        params: Mapping[str, Any],
        named: tuple[str | None, str | None],
        outcome: Any,
        groups: Any,
        tokens: int,
    ) -> tuple[bool, dict[str, Any] | None]:
        """`kvferry.Scheduler.finished`, of a prefill with the name that decode engines may await it by and the digest
        of its prompt."""
        name, digest = named
        own = self._long_ids.of(request_id)
        if name is None:
            return self._scheduler.finished(own, params, outcome, groups, tokens)
        # Whoever awaits a prefill that ends early may get another one of the same name, which is still under way.
        if outcome == "aborted" and any(name == other for other, _ in self._prefills.values()):
            return self._scheduler.finished(own, {**params, "transfer_id": None}, outcome, groups, tokens)
        try:
            return self._scheduler.finished(own, {**params, "transfer_id": name}, outcome, groups, tokens)
        except kvferry.AlreadyExistsError:
            if params.get("transfer_id") is not None:
                raise
            # A prefill of the same prompt is kept under it, which does for whoever awaits this one. An answer with a
            # name in place of blocks needs one of its own, as the decode engine makes it of the answer.
            unique = {**params, "transfer_id": dialects.name_of(request_id, digest)} if self._late else params
            return self._scheduler.finished(own, unique, outcome, groups, tokens)

    def _handed_over(self, request: Request) -> int:
        """How many of the prompt's tokens the prefill engine computes for us, but for the one that `kvferry.Scheduler`
        itself leaves out where there is a state. Of a conversation, how many of its tokens a decode engine has."""
        if (tokens := self._histories.get(request.request_id)) is not None:
            return tokens
        tokens = int(request.num_prompt_tokens)
        return tokens - 1 if self._holds_back and not self._has_state and tokens > 1 else tokens

    def _refuse(self, request: Request, error: kvferry.KvferryError) -> None:
        if request.request_id not in self._refusals:
            self._refusals[request.request_id] = str(error)
            if request.abort_immediately:
                # Under an id that no client knows. The request itself has failed for a reason of its own.
                return
            computed = _names_history(request) or not self._fails_load_errors
            outcome = "its prompt is computed here" if computed else "it fails"
            logger.error(
                "Request %s: its prompt cannot be loaded from another engine, %s: %s",
                library_id(request.request_id),
                outcome,
                error,
            )

    def _to_fill(self, blocks: KVCacheBlocks, tokens: int) -> tuple[list[int], ...]:
        """The blocks that a load fills: of tokens those that have no hash yet, of a state the one after `tokens`."""
        unhashed = self._transferred(blocks.get_unhashed_block_ids_all_groups())
        if not self._has_state:
            return unhashed
        states = self._with_state(self._transferred(blocks.get_block_ids()), tokens)
        return tuple(
            ids if span is None else state for ids, state, span in zip(unhashed, states, self._state_spans, strict=True)
        )

    def _with_state(self, groups: tuple[list[int], ...], tokens: int) -> tuple[list[int], ...]:
        """`groups`, of which those with a state are cut down to the block with the state after `tokens` tokens.

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
        """The work of this engine step, which computes what `output` says; cheap when there is none."""
        if self._wants_blocks and self._multi_turn:
            # A request waits that could have run: conversations give way, one a step, until there is room for it.
            self.make_room()
        self._wants_blocks = False
        refused, self._refused_loads = self._refused_loads, {}
        step = self._scheduler.step() if self._scheduler.has_pending() else b""
        copies = self._copies.take() if self._copies is not None else None
        mark, long_ids = self._progress.step(output), self._long_ids.take()
        metadata = KvferryConnectorMetadata(step, refused, self._granted, mark, copies, long_ids)
        # Work that one step did not hold comes with the next.
        self._granted = self._granted and self._scheduler.has_pending()
        return metadata

    def make_room(self) -> bool:
        """Lets go of the oldest conversation; whether the blocks of this or of an earlier one will be free soon."""
        return self._multi_turn and self._scheduler.forget_histories(1) > 0

    def forget_histories(self) -> None:
        """Lets go of all conversations."""
        self._scheduler.forget_histories()

    def pause(self, paused: bool) -> None:
        """The engine is to have nothing left to do, or goes on."""
        self._paused = paused
        if paused:
            self.forget_histories()

    def has_pending(self) -> bool:
        """Whether an engine step is needed to hand out work, even if no request is left."""
        return bool(self._refused_loads) or self._scheduler.has_pending()

    def update(self, output: KVConnectorOutput) -> None:
        """Takes in the reports of all ranks of one step, and which requests vLLM counts as finished by all ranks.

        Either tells that a request is over, and may come first: vLLM frees a request's blocks by its own ids, so that
        what it has freed must not be waited for here. The one that comes later finds nothing left to do. Nothing comes
        back: vLLM has the ids, failures and figures from its own channels."""
        metadata = output.kv_connector_worker_meta
        if metadata is not None:
            if not isinstance(metadata, KvferryWorkerMetadata):
                raise TypeError(f"expected worker metadata of KvferryConnector, got {type(metadata).__name__}")
            # First, because a report may say that a prefill is not kept any more.
            if metadata.mark:
                self._progress.confirm(metadata.mark)
            for report in metadata.reports:
                self._scheduler.note(report)
        for request in output.finished_sending or ():
            self._progress.forget(request)
            self._scheduler.over(library_id(request), "sending")
            self._long_ids.reported(request)
        for request in output.finished_recving or ():
            if request in self._unreported:
                # The library has refused it: it may not even take the id.
                self._unreported.discard(request)
            else:
                self._scheduler.over(library_id(request), "recving")
            self._long_ids.reported(request)

    def take_stats(self) -> KvferryStats | None:
        """Figures since the last call, None if there are none."""
        if not self._local_requests:
            return None
        taken, self._local_requests = self._local_requests, 0
        return KvferryStats({"local_requests": taken})

    def shutdown(self) -> None:
        """Stops the handshake listener. May be called again."""
        if self._bootstrap is not None:
            self._bootstrap.close()
        self._scheduler.shutdown()
