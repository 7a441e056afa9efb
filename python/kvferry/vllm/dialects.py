"""Translates the `kv_transfer_params` of proxies for vLLM's other connectors.

| dialect | the prefill engine is given | the decode engine is given |
| --- | --- | --- |
| of `NixlPushConnector` | nothing to know the request by | its address, and the `X-Request-Id` of both requests |
| of `MooncakeConnector` | `transfer_id` | `transfer_id`, and what the prefill engine's bootstrap server answered |

Both ask the two engines at once. `name_of` gives the prefill its name then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm import envs

from .._errors import invalid
from . import history, request_ids

if TYPE_CHECKING:
    from vllm.v1.request import Request

SAMPLE = re.compile(r"^\d+_")
"""The beginning of a sample's id, for a request with `n` > 1: its index, before the request's own name."""

_RANDOM = re.compile(r"-[0-9a-f]{8}$")
"""The end that vLLM's front end appends to a request's name (`InputProcessor.assign_request_id`)."""

_INDEX = re.compile(r"[-_]\d+$")
"""The end that it appends to the header for one of several prompts."""

_LATER = re.compile(r"cmpl-.*-[1-9]\d*")
"""Ids of a completion's second and later prompts."""

_PLACEHOLDER = [0]
"""The prompt of a request by which vLLM tells that another one was rejected (`AsyncLLM`)."""

PROMPT = "remote_prompt_digest"
"""The key of `kv_transfer_params` that says which prompt an answer is to."""

NO_DIGEST = (
    "vLLM numbers media in place of hashing them where an engine's prefix cache and processor cache are both off; turn "
    "one of them on in whichever engine has both off (--enable-prefix-caching, or --mm-processor-cache-gb above 0)"
)
"""The reason why a prompt has no digest, and the remedy."""

_NIXL = "remote_blocks_expiry_time"
"""A key that only `NixlConnector`'s answers have, of vLLM 0.32 and 0.33."""
_PUSH = "push"

_ADDRESSED = re.compile(r"(?P<engine>.+)@(?:\[(?P<ipv6>[^\[\]@]+)\]|(?P<host>[^\[\]@:]+)):(?P<port>\d{1,5})")


def base_name(request_id: str) -> str:
    """Returns the part of a request's id that both engines share when a proxy sends them the same `X-Request-Id`.

    It is `cmpl-ID-0` for the first prompt of a completion, and `chatcmpl-ID` for a chat.
    """
    name = SAMPLE.sub("", request_id)
    return name if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION else _RANDOM.sub("", name)


def name_of(base: str, digest: str | None) -> str:
    """Returns the name of a prefill in both engines: the proxy's, or what its header became, and the prompt's digest.

    One name from a proxy may stand for several prompts: those of one completion, or of several calls with one header.
    With the digest, a decode engine gets a prefill of its own prompt. A base that the library does not take, alone or
    with the digest, is replaced by its SHA-256. An empty base is left to `kvferry.Scheduler` to
    refuse.
    """
    if not base or (request_ids.is_taken(base) and (digest is None or base.endswith(f"#{digest}"))):
        return base
    end = "" if digest is None else f"#{digest}"
    return base + end if request_ids.is_taken(base + end) else request_ids.digest(base) + end


def name_of_prefill(request: Request, params: Mapping[str, Any], digest: str | None, late: bool) -> str | None:
    """Returns the name by which decode engines may await a prefill: what the proxy has given, or the header of both
    requests. None if there is none, or if what the proxy has given is no text. Without a digest it is a name that no
    decode engine awaits: nothing is kept.

    `late`: the answer has a name in place of blocks, so that there must be one."""
    transfer_id = params.get("transfer_id")
    if transfer_id is not None:
        return name_of(transfer_id, digest) if isinstance(transfer_id, str) else None
    if params.get("remote_block_ids") is not None:
        # It goes on from a history, which no proxy asks both engines for.
        return name_of(request.request_id, digest) if late else None
    return None if digest is None else name_of(base_name(request.request_id), digest)


def addressed_id(engine_id: str, host: str, port: int) -> str:
    """Returns an engine id with the listener's address, for Mooncake's proxies, which pass on no other."""
    return f"{engine_id}@[{host}]:{port}" if ":" in host else f"{engine_id}@{host}:{port}"


def understood(request: Request, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translates a decode request's params into this connector's keys. Empty for params of another prompt: vLLM answers
    several prompts of a completion with the params of the first.

    Raises `InvalidArgumentError` for the answer to another prompt or of `NixlConnector`, and for a prompt that has no
    digest."""
    stated = params.get(PROMPT)
    answered = stated is not None or params.get("remote_block_ids") is not None
    if request.abort_immediately and (answered or list(request.prompt_token_ids or ()) == _PLACEHOLDER):
        # vLLM announces a rejected request, mostly with a placeholder for its prompt: the prefill that an answer names
        # is released. One that was asked for at the same time cannot be named without its prompt.
        return _translated(request, params, None) if answered else {}
    if params.get(_NIXL) is not None and params.get("remote_incarnation") is None:
        raise invalid(
            f"the kv_transfer_params are an answer of vLLM's NixlConnector (they have {_NIXL} and no "
            "remote_incarnation); run KvferryConnector on the prefill engine too"
        )
    digest = history.fingerprint(request)
    if digest is None:
        raise invalid(f"nobody can tell whether the prefill engine has this prompt: {NO_DIGEST}")
    if answered and stated != digest:
        if _LATER.fullmatch(base_name(request.request_id)):
            return {}
        if stated is not None:
            raise invalid(
                "the prefill engine's answer is to another prompt (remote_prompt_digest differs): send both engines "
                "the same prompt, with adapters of the same name and path, and one prompt per request"
            )
        if request.prompt_embeds is not None:
            raise invalid(
                "the prefill engine's answer does not say to which prompt embeddings it is (remote_prompt_digest is "
                "missing): pass on its kv_transfer_params unchanged, and install the same kvferry on both engines"
            )
    return _translated(request, params, digest)


def _translated(request: Request, params: Mapping[str, Any], digest: str | None) -> Mapping[str, Any]:
    """Translates the params of a prompt's own prefill."""
    pushed = params.get("transfer_mode") == _PUSH
    if params.get("remote_block_ids") is not None:
        # An answer that was passed on whole. That of another connector has no incarnation, and is refused.
        return {**params, "transfer_mode": None} if pushed and params.get("remote_incarnation") else params
    transfer_id, header = params.get("transfer_id"), params.get("remote_request_id")
    if transfer_id is None and isinstance(header, str):
        transfer_id = base_name(request.request_id) if is_named_by(request.request_id, header) else None
    if transfer_id is None:
        return params
    own = {**params, "transfer_id": name_of(transfer_id, digest) if isinstance(transfer_id, str) else transfer_id}
    own["remote_request_id"] = None
    if pushed:
        own["transfer_mode"] = None
    if params.get("remote_bootstrap_addr") is not None and params.get("remote_host") is None:
        found = _ADDRESSED.fullmatch(str(params.get("remote_engine_id")))
        if found is not None:
            own["remote_engine_id"], own["remote_port"] = found["engine"], int(found["port"])
            own["remote_host"] = found["ipv6"] or found["host"]
    return own


def is_named_by(request_id: str, header: str) -> bool:
    """Tells whether a request's id was made of this `X-Request-Id`: the front end prepends a word such as `cmpl-`. An
    id that an engine has answered with does not fit, because it has that word already."""
    name = base_name(request_id)
    for candidate in (name, _INDEX.sub("", name)):
        word = candidate.removesuffix(header)
        if word != candidate and word.endswith("-") and word.replace("-", "").isalpha():
            return True
    return False


def as_push(answer: dict[str, Any]) -> None:
    """Marks an answer so that routers take it for one of `NixlPushConnector`."""
    answer["transfer_mode"] = _PUSH
