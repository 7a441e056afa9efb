"""How much of a conversation a prefill engine finds in what a decode engine has."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry import InvalidArgumentError
from kvferry.vllm.history import MOST_DIGESTS, describe, in_common

KEY = "remote_token_digests"
HELD = 100
TOKENS = [(7 * at) % 499 for at in range(400)]


def request(tokens: list[int], **changes: Any) -> Any:
    plain: dict[str, Any] = {"lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None}
    return SimpleNamespace(all_token_ids=tokens, num_prompt_tokens=len(tokens), **{**plain, **changes})


def medium(identifier: str, offset: int, length: int = 4) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def history(tokens: list[int] = TOKENS, held: int = HELD, **changes: Any) -> dict[str, Any]:
    return {"remote_num_tokens": held, KEY: describe(request(tokens, **changes), held)}


@pytest.mark.parametrize(
    ("prompt", "common", "whole"),
    [
        (TOKENS[:150], 100, 100),
        (TOKENS[:101], 100, 100),
        # Its last token has to be computed.
        (TOKENS[:100], 96, 0),
        (TOKENS[:97], 96, 0),
        (TOKENS[:96], 80, 0),
        ([*TOKENS[:99], 500, *TOKENS[100:150]], 96, 0),
        ([*TOKENS[:50], 500, *TOKENS[51:150]], 48, 0),
        ([*TOKENS[:50], *TOKENS[60:150]], 48, 0),
        ([500, *TOKENS[1:150]], 0, 0),
        (TOKENS[:1], 0, 0),
    ],
)
def test_as_far_as_both_agree(prompt: list[int], common: int, whole: int) -> None:
    assert in_common(request(prompt), history(), whole=False) == common
    assert in_common(request(prompt), history(), whole=True) == whole


ADAPTER = SimpleNamespace(lora_name="a", lora_path="/a")


@pytest.mark.parametrize(
    ("theirs", "ours", "common"),
    [
        ({"cache_salt": "x"}, {"cache_salt": "x"}, 100),
        ({"cache_salt": "x"}, {"cache_salt": "y"}, 0),
        ({"cache_salt": "x"}, {}, 0),
        ({"lora_request": ADAPTER}, {"lora_request": ADAPTER}, 100),
        ({"lora_request": ADAPTER}, {}, 0),
        ({"lora_request": ADAPTER}, {"lora_request": SimpleNamespace(lora_name="a", lora_path="/b")}, 0),
        ({"mm_features": [medium("cat", 40)]}, {"mm_features": [medium("cat", 40)]}, 100),
        # What the tokens stand for is another picture, or the same one somewhere else.
        ({"mm_features": [medium("cat", 40)]}, {"mm_features": [medium("dog", 40)]}, 32),
        ({"mm_features": [medium("cat", 40)]}, {"mm_features": [medium("cat", 41)]}, 32),
        ({"mm_features": [medium("cat", 40)]}, {"mm_features": [medium("cat", 40, 5)]}, 32),
        ({}, {"mm_features": [medium("cat", 47)]}, 32),
        # The next turn brings one of its own.
        ({}, {"mm_features": [medium("cat", 120)]}, 100),
        ({}, {"prompt_embeds": object()}, 0),
    ],
)
def test_what_else_the_cache_depends_on(theirs: dict[str, Any], ours: dict[str, Any], common: int) -> None:
    assert in_common(request(TOKENS[:150], **ours), history(**theirs), whole=False) == common


def test_media_are_taken_in_their_order() -> None:
    cat, dog = medium("cat", 40), medium("dog", 60)
    assert history(mm_features=[cat, dog]) == history(mm_features=[dog, cat])
    assert history(mm_features=[cat, dog]) != history(mm_features=[cat])


def test_tokens_that_are_not_ids_cannot_be_told() -> None:
    embeds = request([0] * 40, prompt_embeds=object())
    assert describe(embeds, 40) is None
    assert describe(embeds, 1) is None
    assert describe(embeds, 0) == {"step": 16, "digests": ""}
    assert in_common(embeds, history([0] * 40, 1), whole=False) == 0


@pytest.mark.parametrize("held", [0, 1, 15, 16, 17, 4096, 4097, 100_000])
def test_digests_are_bounded_and_those_that_were_made_can_be_read(held: int) -> None:
    tokens = [at % 5000 for at in range(held + 50)]
    stated = history(tokens, held)
    assert len(base64.b64decode(stated[KEY]["digests"])) <= 16 * MOST_DIGESTS
    assert stated[KEY]["step"] == max(16, -(-held // 256))
    assert in_common(request(tokens), stated, whole=True) == held
    other = [*tokens[: held // 2], 7777, *tokens[held // 2 + 1 :]]
    found = in_common(request(other), stated, whole=False)
    assert held // 2 - stated[KEY]["step"] < found <= held // 2


DIGESTS = base64.b64encode(bytes(7 * 16)).decode()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "remote_num_tokens must be a number of tokens, not None"),
        ({"remote_num_tokens": True}, "remote_num_tokens must be a number of tokens, not True$"),
        ({"remote_num_tokens": "9" * 62}, f"must be a number of tokens, not '{'9' * 62}'$"),
        ({"remote_num_tokens": "9" * 63}, f"must be a number of tokens, not '{'9' * 63}\\.\\.\\.$"),
        ({"remote_num_tokens": -1}, "remote_num_tokens must be a number of tokens"),
        ({"remote_num_tokens": 100}, f"{KEY} must be the map .* not NoneType"),
        ({"remote_num_tokens": 100, KEY: [1]}, f"{KEY} must be the map .* not list"),
        (
            {"remote_num_tokens": 100, KEY: {"digests": DIGESTS}},
            "step must be a number of tokens of at least 1, not None",
        ),
        ({"remote_num_tokens": 100, KEY: {"step": 0, "digests": DIGESTS}}, "step must be a number"),
        ({"remote_num_tokens": 1, KEY: {"step": True, "digests": DIGESTS[:22] + "=="}}, "step must be .*, not True$"),
        ({"remote_num_tokens": 100, KEY: {"step": 16, "digests": 5}}, "must be 7 digests of 16 bytes"),
        ({"remote_num_tokens": 100, KEY: {"step": 16, "digests": "!"}}, "must be 7 digests of 16 bytes"),
        ({"remote_num_tokens": 100, KEY: {"step": 16, "digests": "\u00e4"}}, "must be 7 digests of 16 bytes"),
        ({"remote_num_tokens": 100, KEY: {"step": 16, "digests": f"!{DIGESTS}"}}, "must be 7 digests of 16 bytes"),
        ({"remote_num_tokens": 113, KEY: {"step": 16, "digests": DIGESTS}}, "must be 8 digests of 16 bytes"),
        ({"remote_num_tokens": 10**12, KEY: {"step": 1, "digests": ""}}, "at most 256"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(params: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        in_common(request(TOKENS), params, whole=False)


@pytest.mark.parametrize("digests", [7, None, "!", ""])
def test_an_empty_history_needs_no_digests(digests: Any) -> None:
    assert in_common(request(TOKENS), {"remote_num_tokens": 0, KEY: {"step": 16, "digests": digests}}, whole=True) == 0


def test_a_digest_is_what_the_page_says() -> None:
    """By the words of docs/protocol.md, not by the code."""
    import hashlib
    import json

    def fact(value: Any) -> bytes:
        text = json.dumps(value).encode()
        return len(text).to_bytes(8, "little") + text

    told = fact(["kvferry-history-1", ["a", "/a"], "salt"])
    told += b"".join(token.to_bytes(8, "little") for token in TOKENS[:16])
    first = hashlib.blake2b(told, digest_size=16).digest()
    told += fact(["cat", 17, 4]) + b"".join(token.to_bytes(8, "little") for token in TOKENS[16:20])
    second = hashlib.blake2b(told, digest_size=16).digest()
    made = describe(request(TOKENS, lora_request=ADAPTER, cache_salt="salt", mm_features=[medium("cat", 17)]), 20)
    assert made == {"step": 16, "digests": base64.b64encode(first + second).decode()}
