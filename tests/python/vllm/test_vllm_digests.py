"""Digests tell apart every two prompts that vLLM's own prefix cache tells apart."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvferry.vllm import history
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

WIDTH = 4
IDS = [5, 6, 7, 8, 9, 10] * 6
NUMBERED = ("renderer0-mm-7-image-0", "tuned:renderer0-mm-7-image-0")
"""Media that vLLM has numbered, without and with the adapter of a tower."""


def rows(seed: int, tokens: int) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def media(*places: tuple[str, int, int]) -> list[MultiModalFeatureSpec]:
    return [
        MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length), identifier)
        for identifier, offset, length in places
    ]


def adapter(name: str, path: str) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=1, lora_path=path)


@pytest.fixture(scope="module", autouse=True)
def hashes() -> None:
    init_none_hash(sha256)


def fact(value: Any) -> bytes:
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


def tokens(ids: list[int]) -> bytes:
    return b"".join(each.to_bytes(8, "little") for each in ids)


def make(ids: list[int] | None = None, name: str = "cmpl-x-0-0a1b2c3d", **more: Any) -> Request:
    """A request as vLLM's engine has it, which hashes every token."""
    params = more.pop("params", None)
    sampling = SamplingParams(max_tokens=1, extra_args=None if params is None else {"kv_transfer_params": params})
    embeds = more.get("prompt_embeds")
    ids = IDS if ids is None and embeds is None else ids
    return Request(name, ids, sampling, None, block_hasher=get_request_block_hasher(1, sha256), **more)


def kinds() -> Iterator[dict[str, Any]]:
    """Every kind of input that a request can carry, with every other."""
    mask = [True] * 30 + [False] * 6
    shorter = [True] * 31 + [False] * 5
    edge = [*IDS[:35], 11]
    prompts: list[dict[str, Any]] = [
        *({"ids": ids} for ids in (IDS, edge, [11, *IDS[1:]], IDS[:35], IDS[:1], [6], [0], [0] * 36)),
        *({"prompt_embeds": each} for each in (rows(1, 36), rows(2, 36), rows(1, 35), rows(1, 1), rows(2, 1))),
        {"prompt_embeds": torch.cat((rows(1, 35), rows(2, 1)))},
        *({"ids": ids, "prompt_embeds": rows(1, 36), "prompt_is_token_ids": mask} for ids in (IDS, [11, *IDS[1:]])),
        *({"ids": IDS, "prompt_embeds": rows(seed, 36), "prompt_is_token_ids": shorter} for seed in (1, 2)),
    ]
    adapters = (None, adapter("a", "/a"), adapter("a", "/b"), adapter("b", "/a"))
    shown = (
        *(media(), media(("cat", 0, 1)), media(("dog", 0, 1)), media(("cat", 0, 9)), media(("cat", 20, 9))),
        *(media(("cat", 21, 9)), media(("cat", 20, 8)), media(("dog", 20, 9))),
        media(("cat", 2, 4), ("dog", 20, 9)),
        media(("dog", 2, 4), ("cat", 20, 9)),
    )
    for prompt, lora, salt, features in itertools.product(prompts, adapters, (None, "s", "t"), shown):
        yield {**prompt, "lora_request": lora, "cache_salt": salt, "mm_features": features}


def test_prompts_that_vllm_tells_apart_have_different_digests() -> None:
    known: dict[str, set[bytes]] = defaultdict(set)
    for kind in kinds():
        request = make(**kind)
        digest = history.fingerprint(request)
        assert digest is not None, kind
        known[digest].add(request.block_hashes[-1])
    assert [hashes for hashes in known.values() if len(hashes) > 1] == []
    assert len(known) > 1000


def test_a_prompt_has_one_digest_whatever_its_request_is() -> None:
    for prompt in itertools.islice(kinds(), 0, None, 50):
        params = {"do_remote_decode": True}
        assert history.fingerprint(make(**prompt)) == history.fingerprint(make(name="x", params=params, **prompt))


def test_histories_agree_no_further_than_vllms_hashes() -> None:
    """Of every two requests, and at least as far as whole steps of their tokens agree."""
    some = [kind for at, kind in enumerate(kinds()) if at % 17 == 0]
    held = [(kind, history.describe(make(**kind), make(**kind).num_prompt_tokens)) for kind in some]
    ours = [make(**kind) for kind in some]
    compared = 0
    for theirs, digests in held:
        request = make(**theirs)
        if request.prompt_embeds is not None:
            assert digests is None
            continue
        params = {"remote_num_tokens": request.num_prompt_tokens, history.KEY: digests}
        for other in ours:
            common = history.in_common(other, params, whole=False)
            assert request.block_hashes[:common] == other.block_hashes[:common]
            compared += common > 0
    assert compared > 50


def test_a_plain_prompt_keeps_its_digest() -> None:
    """Engines of earlier releases have the same one."""
    assert history.fingerprint(make([1, 2, 3])) == "c54860db93c47bb915a1727f748eb71a"


def test_a_prompts_digest_is_what_the_page_says() -> None:
    """By the words of docs/protocol.md, not by the code."""

    def expected(*told: bytes) -> str:
        return hashlib.blake2b(b"".join(told), digest_size=16).hexdigest()

    more: dict[str, Any] = {"lora_request": adapter("a", "/a"), "cache_salt": "s"}
    plain = [fact(["kvferry-prompt-1", ["a", "/a"], "s"]), fact(["cat", 1, 2]), tokens([7, 8, 9])]
    assert history.fingerprint(make([7, 8, 9], mm_features=media(("cat", 1, 2)), **more)) == expected(*plain)
    embeds = rows(1, 3)
    content = [*("torch.bfloat16", [3, WIDTH]), hashlib.sha256(embeds.view(torch.uint8).numpy().tobytes()).hexdigest()]
    whole = [fact(["kvferry-embeds-1", ["a", "/a"], "s", *content, None]), tokens([0, 0, 0])]
    assert history.fingerprint(make(prompt_embeds=embeds, **more)) == expected(*whole)
    mixed = [fact(["kvferry-embeds-1", None, None, *content, "a0"]), tokens([7, 0, 9])]
    is_token = {"prompt_embeds": embeds, "prompt_is_token_ids": [True, False, True]}
    assert history.fingerprint(make([7, 8, 9], **is_token)) == expected(*mixed)


def test_an_empty_prompt_has_a_digest() -> None:
    empty = make([], prompt_embeds=rows(1, 0), prompt_is_token_ids=[])
    assert len({*(history.fingerprint(each) for each in (make([]), make([0]), empty)), None}) == 4


@pytest.mark.parametrize("identifier", NUMBERED)
def test_numbered_media_have_no_digest(identifier: str) -> None:
    shown = media(("cat", 2, 4), (identifier, 20, 9))
    assert history.fingerprint(make(mm_features=shown)) is None
    assert history.describe(make(mm_features=shown), 36) is None
    assert history.describe(make(mm_features=shown), 21) is None
    # What is in front of them is as known as ever.
    assert history.describe(make(mm_features=shown), 20) == history.describe(make(mm_features=shown[:1]), 20)


@pytest.mark.parametrize("identifier", NUMBERED)
def test_numbered_media_have_nothing_in_common(identifier: str) -> None:
    """Nor with an engine of an earlier release, which states digests of them."""
    told = {"remote_num_tokens": 36, history.KEY: _of_an_earlier_release(identifier)}
    assert history.in_common(make([*IDS, 4], mm_features=media((identifier, 20, 9))), told, whole=False) == 16
    assert history.in_common(make([*IDS, 4], mm_features=media((identifier, 20, 9))), told, whole=True) == 0


def _of_an_earlier_release(identifier: str) -> Any:
    """The digests of a prompt with such a medium, as if it were known by its content."""
    told, digests = fact(["kvferry-history-1", None, None]), b""
    for start in range(0, 36, 16):
        told += fact([identifier, 20, 9]) if start == 16 else b""
        told += tokens(IDS[start : start + 16])
        digests += hashlib.blake2b(told, digest_size=16).digest()
    return {"step": 16, "digests": base64.b64encode(digests).decode()}
