"""Describes which conversation a decode engine's blocks hold, so that a prefill engine can compare the next turn.

The next turn's prompt need not begin with the tokens that the decode engine has: clients strip reasoning, and templates
and tokenizers write a turn differently than the model did. So digests of the tokens travel with the blocks, and only
what both have in common is loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.utils import tensor_data

from .._errors import invalid

if TYPE_CHECKING:
    from vllm.v1.request import Request

KEY = "remote_token_digests"
"""The key of `kv_transfer_params`."""

DIGEST_BYTES = 16
"""Long enough that a client cannot construct a conversation with another prompt's digest. The prefill engine's prefix
cache would give its cache to requests with that prompt."""

MOST_DIGESTS = 256
"""Limits the digests of a conversation to 6 KiB."""

LEAST_STEP = 16
"""The least number of tokens between digests; vLLM's smallest block."""


def describe(request: Request, tokens: int) -> dict[str, Any] | None:
    """Returns digests of the request's first `tokens` tokens: of the first `step`, of 2 `step` and so on, and of all.
    None where these do not tell what was computed: with prompt embeddings, and with media that vLLM has numbered."""
    if _covered(request, tokens) < tokens:
        return None
    step = max(-(-tokens // MOST_DIGESTS), LEAST_STEP)
    digests = b"".join(digest for _, digest in _beginnings(request, tokens, step))
    return {"step": step, "digests": base64.b64encode(digests).decode()}


def fingerprint(request: Request) -> str | None:
    """Returns a digest of the request's prompt and of all else that its cache depends on, as text; the same in every
    engine that gets the request. It differs wherever vLLM's own prefix cache tells two prompts apart. None for media
    that vLLM has numbered: another engine has the number for another picture."""
    tokens = request.num_prompt_tokens
    if _unnumbered(request, tokens) < tokens:
        return None
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    facts = [_adapter(request), request.cache_salt]
    if request.prompt_embeds is None:
        _add(state, ["kvferry-prompt-1", *facts])
    else:
        _add(state, ["kvferry-embeds-1", *facts, *_embeddings(request.prompt_embeds, request.prompt_is_token_ids)])
    for _ in _extend(state, request, tokens, max(tokens, 1)):
        pass
    return state.hexdigest()


def in_common(request: Request, params: Mapping[str, Any], whole: bool) -> int:
    """Returns how many tokens a prompt's beginning shares with the history that `params` name, as far as its digests
    tell. With `whole`, all of the history or none. The prompt's last token never counts: it has to be computed.

    Raises `InvalidArgumentError` for digests that are missing or cannot be read.
    """
    held, stated = params.get("remote_num_tokens"), params.get(KEY)
    if not isinstance(held, int) or isinstance(held, bool) or held < 0:
        raise invalid(f"remote_num_tokens must be a number of tokens, not {_shown(held)}")
    step, digests = _parse(stated, held)
    most = _covered(request, request.num_prompt_tokens - 1)
    common = 0
    for at, (tokens, digest) in enumerate(_beginnings(request, min(held, most), step)):
        # The last beginning of a shorter prompt is none of the history's.
        if tokens != min((at + 1) * step, held) or digest != digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]:
            break
        common = tokens
    return common if not whole or common == held else 0


def _parse(stated: Any, held: int) -> tuple[int, bytes]:
    if not isinstance(stated, Mapping):
        raise invalid(
            f"{KEY} must be the map that the decode engine answered with, not {type(stated).__name__}: it tells "
            "whether the blocks hold this prompt. Pass on the kv_transfer_params of a decode engine with "
            "KvferryConnector unchanged"
        )
    step, text = stated.get("step"), stated.get("digests")
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise invalid(f"{KEY}.step must be a number of tokens of at least 1, not {_shown(step)}")
    try:
        digests = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        digests = b""
    expected = -(-held // step)
    if expected > MOST_DIGESTS or len(digests) != expected * DIGEST_BYTES:
        raise invalid(
            f"{KEY}.digests must be {expected} digests of {DIGEST_BYTES} bytes in base64, at most {MOST_DIGESTS}, for "
            f"{held} tokens in steps of {step}"
        )
    return step, digests


def _shown(value: Any) -> str:
    """Shows a value from outside, which may be of any length."""
    text = repr(value)
    return text if len(text) <= 64 else f"{text[:64]}..."


def _beginnings(request: Request, tokens: int, step: int) -> Iterator[tuple[int, bytes]]:
    """Yields the lengths and digests of a request's beginnings, in steps up to `tokens`. Each covers all that the cache
    of its tokens depends on: the adapter, the salt that keeps tenants apart, the media in its tokens' place."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    _add(state, ["kvferry-history-1", _adapter(request), request.cache_salt])
    for end in _extend(state, request, tokens, step):
        yield end, state.digest()


def _extend(state: Any, request: Request, tokens: int, step: int) -> Iterator[int]:
    """Adds a request's first `tokens` tokens, and the media among them, in steps; yields each step's end."""
    media = sorted(request.mm_features or (), key=lambda feature: feature.mm_position.offset)
    ids = np.asarray(request.all_token_ids[:tokens], dtype="<u8").tobytes()
    size, at = 8, 0
    for start in range(0, tokens, step):
        end = min(start + step, tokens)
        while at < len(media) and media[at].mm_position.offset < end:
            position = media[at].mm_position
            _add(state, [media[at].identifier, position.offset, position.length])
            at += 1
        state.update(ids[start * size : end * size])
        yield end


def _covered(request: Request, tokens: int) -> int:
    """Returns how many of a request's first `tokens` tokens the digests of a history cover. Conversations do not go on
    from prompt embeddings, which are therefore hashed once only."""
    return 0 if request.prompt_embeds is not None else _unnumbered(request, tokens)


def _unnumbered(request: Request, tokens: int) -> int:
    """Returns how many of a request's first `tokens` tokens precede media that vLLM has numbered in place of hashing
    them (`Renderer._process_mm_uuids`). With the adapter of a tower, its name and a colon come first."""
    features = request.mm_features or ()
    for feature in features:
        if any(part.startswith("renderer") for part in feature.identifier.split(":")):
            tokens = min(tokens, feature.mm_position.offset)
    return tokens


def _adapter(request: Request) -> list[str] | None:
    """Returns the adapter as vLLM's prefix cache knows it. A name may pass to another adapter, with another path."""
    lora = request.lora_request
    return lora and [lora.lora_name, lora.lora_path]


def _embeddings(embeds: Any, is_token: list[bool] | None) -> list[Any]:
    """Returns the facts of a prompt's embeddings (tokens, width): all rows, as vLLM hashes them, and which positions
    have token ids in their place. SHA-256 because hardware computes it, several times faster than BLAKE2b: a row takes
    kilobytes, and the engine waits."""
    content = hashlib.sha256(tensor_data(embeds)).hexdigest()
    mask = None if is_token is None else np.packbits(np.asarray(is_token, dtype=bool)).tobytes().hex()
    return [str(embeds.dtype), list(embeds.shape), content, mask]


def _add(state: Any, facts: list[Any]) -> None:
    text = json.dumps(facts).encode()
    state.update(len(text).to_bytes(8, "little") + text)
