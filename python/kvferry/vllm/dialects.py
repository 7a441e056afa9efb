"""`kv_transfer_params` as proxies for vLLM's other connectors send them, in the words of this one.

| dialect | the prefill engine is given | the decode engine is given |
| --- | --- | --- |
| of `NixlPushConnector` | nothing to know the request by | its address, and the `X-Request-Id` of both requests |
| of `MooncakeConnector` | `transfer_id` | `transfer_id`, and what the prefill engine's bootstrap server answered |

Both ask the two engines at once. The first is known by `shared_name`, the second by `transfer_id`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm import envs

from . import history

if TYPE_CHECKING:
    from vllm.v1.request import Request

SAMPLE = re.compile(r"^\d+_")
"""How vLLM names the samples of a request with `n` > 1: their index, and the request's own name."""

_RANDOM = re.compile(r"-[0-9a-f]{8}$")
"""What vLLM's front end appends to the name of a request (`InputProcessor.assign_request_id`)."""

_INDEX = re.compile(r"[-_]\d+$")
"""What it appends to the header for one of several prompts."""

LONGEST_NAME = 512
"""Bytes of a request's name."""

_PUSH = "push"

_PLACE = re.compile(r"(?P<engine>.+)@(?:\[(?P<ipv6>[^\[\]@]+)\]|(?P<host>[^\[\]@:]+)):(?P<port>\d{1,5})")


def base_name(request_id: str) -> str:
    """Of a request's id in this engine: what the same request is called in another engine too, when a proxy sends both
    the same `X-Request-Id`: `cmpl-ID-0` for the first prompt of a completion, `chatcmpl-ID` for a chat."""
    name = SAMPLE.sub("", request_id)
    return name if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION else _RANDOM.sub("", name)


def shared_name(request: Request, tokens: int) -> str | None:
    """A name by which two engines know the same request of a proxy that gives both the same `X-Request-Id`.

    Headers are used again: for retries, for several calls of one session. So a digest of the prompt's first `tokens`
    tokens is in the name, and whoever awaits a prefill by its name gets one of the prompt that it has itself. None
    where tokens do not tell what is computed, and for a header that is too long for a name.
    """
    digest = history.fingerprint(request, tokens)
    name = f"{base_name(request.request_id)}#{digest}"
    return None if digest is None or len(name.encode()) > LONGEST_NAME else name


def place(engine_id: str, host: str, port: int) -> str:
    """An engine id for proxies of Mooncake's dialect, which tell a decode engine no other address of the listener."""
    return f"{engine_id}@[{host}]:{port}" if ":" in host else f"{engine_id}@{host}:{port}"


def understood(request: Request, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a decode engine is given, in the words of this connector."""
    pushed = params.get("transfer_mode") == _PUSH
    if params.get("remote_block_ids") is not None:
        # An answer that was passed on whole. That of another connector has no incarnation, and is refused.
        return {**params, "transfer_mode": None} if pushed and params.get("remote_incarnation") else params
    transfer_id = params.get("transfer_id")
    if transfer_id is None:
        header = params.get("remote_request_id")
        if not isinstance(header, str) or not is_named_by(request.request_id, header):
            return params
        transfer_id = shared_name(request, request.num_prompt_tokens - 1)
        if transfer_id is None:
            return params
    own = {**params, "transfer_id": transfer_id, "remote_request_id": None}
    if pushed:
        own["transfer_mode"] = None
    if params.get("remote_bootstrap_addr") is not None and params.get("remote_host") is None:
        found = _PLACE.fullmatch(str(params.get("remote_engine_id")))
        if found is not None:
            own["remote_engine_id"], own["remote_port"] = found["engine"], int(found["port"])
            own["remote_host"] = found["ipv6"] or found["host"]
    return own


def is_named_by(request_id: str, header: str) -> bool:
    """Whether a request's id was made of this `X-Request-Id`: the front end puts a word such as `cmpl-` in front of it.
    An id that an engine has answered with does not fit, because it has that word already."""
    name = base_name(request_id)
    for candidate in (name, _INDEX.sub("", name)):
        word = candidate.removesuffix(header)
        if header and word != candidate and word.endswith("-") and word.replace("-", "").isalpha():
            return True
    return False


def as_push(answer: dict[str, Any]) -> None:
    """Makes routers that know `NixlPushConnector`'s answers take this one for one of them."""
    answer["transfer_mode"] = _PUSH
