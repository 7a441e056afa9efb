"""Rows of the fault matrix that do something to the request, and nothing to the engines or the network."""

from __future__ import annotations

import asyncio
from typing import Any

from lab.matrix.case import Case, Reference
from lab.matrix.rows import row
from lab.servers.pair import ROLES

UNKNOWN = "cmpl-nobody-has-asked-for-this-0-00000000"
OUT_OF_RANGE = 1_000_000


@row("unknown-id", "unknown request id")
async def unknown_id(case: Case) -> None:
    """A prefill waits; its reference comes with the id of a request that there never was."""
    reference = await case.prefill(case.prompt())
    changed = reference.but(remote_request_id=UNKNOWN)
    await case.decode(Reference(changed.prompt, "nobody-has-asked-for-this", changed.params))


@row("blocks-out-of-range", "block ids out of range")
async def blocks_out_of_range(case: Case) -> None:
    """As many block ids as there should be, each far behind the last block of P's cache."""
    reference = await case.prefill(case.prompt())
    ids = reference.params.get("remote_block_ids")
    await case.decode(reference.but(remote_block_ids=_moved(ids)))


def _moved(ids: Any) -> Any:
    """Nested lists of numbers, with each number far too large."""
    return [_moved(part) for part in ids] if isinstance(ids, list) else ids + OUT_OF_RANGE


@row("twice-in-turn", "reference used twice, one after the other")
async def twice_in_turn(case: Case) -> None:
    """The second time D has forgotten what it loaded the first time."""
    reference = await case.prefill(case.prompt())
    await case.decode(reference, "first")
    await case.pair.forget("decode")
    await case.decode(reference, "second")


@row("twice-at-once", "reference used twice at once")
async def twice_at_once(case: Case) -> None:
    """Two requests with the same reference."""
    reference = await case.prefill(case.prompt())
    await asyncio.gather(case.decode(reference, "one"), case.decode(reference, "other"))


@row("sent-twice", "both requests sent twice")
async def sent_twice(case: Case) -> None:
    """A proxy that repeats its requests: two prefills under one id, and a decode for each, at once."""
    prompt = case.prompt()
    first = await case.prefill(prompt)
    second = await case.prefill(prompt, request_id=first.request_id)
    await asyncio.gather(case.decode(first, "first"), case.decode(second, "second"))


@row("n-2", "`n` = 2")
async def two_choices(case: Case) -> None:
    """A proxy passes the whole request on to both engines. Greedy choices are equal."""
    reference = await case.prefill(case.prompt(), n=2)
    await case.decode(reference, "n = 2", n=2)


@row("reused", "reference used after its blocks were reused by other prompts")
async def reused(case: Case) -> None:
    """D has read the reference and P has freed its blocks; then other prompts go through all of P's pool, and D, which
    has forgotten the prompt, is given the same reference again."""
    reference = await case.prefill(case.prompt())
    await case.decode(reference, "first")
    await case.blocks_back("prefill")
    await case.fill("prefill")
    await case.pair.forget("decode")
    await case.decode(reference, "after the reuse")


@row("lease-before", "lease runs out before the read, blocks reused")
async def lease_before(case: Case) -> None:
    """Nobody asks until P, by its own metrics, has given the blocks up, and other prompts went through its pool."""
    reference = await case.prefill(case.prompt())
    await case.blocks_back("prefill")
    await case.fill("prefill")
    await case.decode(reference, "after the lease")


@row("null-flags", "null flags, as proxies send them")
async def null_flags(case: Case) -> None:
    """`do_remote_prefill: null` to P, `do_remote_decode: null` to D."""
    reference = await case.prefill(case.prompt(), judged=True, do_remote_prefill=None)
    await case.decode(reference.but(do_remote_decode=None), "null flags")


@row("null-keys", "each key null")
async def null_keys(case: Case) -> None:
    """Each key of the params in turn, but for the flag that asks for the hand-over."""
    await _each_key(case, "null", lambda params, key: {**params, key: None})


@row("missing-keys", "each key missing")
async def missing_keys(case: Case) -> None:
    """As `null-keys`, with the key left out."""
    await _each_key(case, "missing", lambda params, key: {name: params[name] for name in params if name != key})


@row("typed-keys", "each key of another type")
async def typed_keys(case: Case) -> None:
    """Texts become numbers, numbers texts, lists maps."""
    await _each_key(case, "of another type", lambda params, key: {**params, key: _other_type(params[key])})


def _other_type(value: Any) -> Any:
    if isinstance(value, bool):
        return "maybe"
    if isinstance(value, int):
        return f"{value}x"
    return {"one": 1} if isinstance(value, list) else 17


async def _each_key(case: Case, words: str, change: Any) -> None:
    """Until an engine is dead or stuck or a request hangs: the keys that are left would meet engines that are not as
    before, and each could take as long as a hang is waited for."""
    for key in (await case.prefill(case.prompt(200))).params:
        if key in ("do_remote_prefill", "do_remote_decode"):
            continue
        reference = await case.prefill(case.prompt(200))
        changed = Reference(reference.prompt, reference.request_id, change(reference.params, key))
        outcome = await case.decode(changed, f"`{key}` {words}")
        engines = [await case.pair.look(role) for role in ROLES]
        if outcome.hung or any(engine.dead is not None or engine.stuck for engine in engines):
            return


@row("other-name", "another name or address of the host")
async def other_name(case: Case) -> None:
    """A proxy writes P's host by a name or a second address, between requests that leave it as P said."""
    for host in (None, *case.network.prefill.aliases, None):
        reference = await case.prefill(case.prompt())
        changed = reference if host is None else reference.but(remote_host=host)
        await case.decode(changed, f"by {host or 'what P said'}")


@row("client-left", "client leaves during the read", hosts=True)
async def client_left(case: Case) -> None:
    """The link is slow, and a tenth of the cache is there when the client closes its connection."""
    await case.leave(await case.prefill(case.prompt(1500)))
    await case.hand_over("the next")
