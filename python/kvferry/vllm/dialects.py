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
from typing import Any

SAMPLE = re.compile(r"^\d+_")
"""How vLLM names the samples of a request with `n` > 1: their index, and the request's own name."""

_RANDOM = re.compile(r"-[0-9a-f]{8}$")
"""What vLLM's front end appends to the name of a request (`InputProcessor.assign_request_id`)."""

_PUSH = "push"

_PLACE = re.compile(r"(?P<engine>.+)@(?:\[(?P<ipv6>[^\[\]@]+)\]|(?P<host>[^\[\]@:]+)):(?P<port>\d{1,5})")


def shared_name(request_id: str) -> str:
    """Of a request's id in this engine: what the same request is called in another engine too, when a proxy sends both
    the same `X-Request-Id`: `cmpl-ID-0` for the first prompt of a completion, `chatcmpl-ID` for a chat."""
    return _RANDOM.sub("", SAMPLE.sub("", request_id, count=1))


def place(engine_id: str, host: str, port: int) -> str:
    """An engine id for proxies of Mooncake's dialect, which tell a decode engine no other address of the listener."""
    return f"{engine_id}@[{host}]:{port}" if ":" in host else f"{engine_id}@{host}:{port}"


def understood(request_id: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a decode engine is given, in the words of this connector. `request_id` is its own id of the request."""
    pushed = params.get("transfer_mode") == _PUSH
    if params.get("remote_block_ids") is not None:
        # An answer that was passed on whole. That of another connector has no incarnation, and is refused.
        return {**params, "transfer_mode": None} if pushed and params.get("remote_incarnation") else params
    transfer_id = params.get("transfer_id")
    if transfer_id is None:
        transfer_id = _name_by_header(request_id, params.get("remote_request_id"))
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


def _name_by_header(request_id: str, header: Any) -> str | None:
    """The name of a request whose `X-Request-Id` was `header`. An id that an engine has answered with is none: that has
    in it what the front end puts around the header, so that what is around it here does not fit."""
    name = shared_name(request_id)
    fits = isinstance(header, str) and header and re.fullmatch(rf"[a-z]+-{re.escape(header)}(?:[-_]\d+)?", name)
    return name if fits else None


def named(request_id: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a prefill engine is given, with a name by which a decode engine can await it where the proxy gives none. A
    request that goes on from a decode engine's history has none: no proxy of these dialects sends one."""
    if params.get("transfer_id") is not None or params.get("remote_block_ids") is not None:
        return params
    return {**params, "transfer_id": shared_name(request_id)}


def as_push(answer: dict[str, Any]) -> None:
    """Makes routers that know `NixlPushConnector`'s answers take this one for one of them."""
    answer["transfer_mode"] = _PUSH
