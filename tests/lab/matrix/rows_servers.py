"""Rows of the fault matrix that freeze, kill or start engines, or do something to the network."""

from __future__ import annotations

import asyncio
import contextlib
import random

import msgpack

from lab.faults.zmtp import GREETING, Client, frame
from lab.matrix.case import LONG, CannotRun, Case, check_under_way
from lab.matrix.pair import DRAIN_LIMIT_S
from lab.matrix.peers import LEASE_S
from lab.matrix.rows import row
from lab.servers.client import LIMIT_S

GARBAGE = 300
FIREWALLED_S = 2.0
"""How long a hand-over waits behind the firewall before the plain request comes."""

_LONG_OUTPUT = 200
_FREEZE_LIMIT_S = LIMIT_S + LEASE_S + 2 * DRAIN_LIMIT_S


@row("lease-during", "lease runs out during the read, blocks reused", hosts=True)
async def lease_during(case: Case) -> None:
    """D is frozen when a tenth of the cache has come over the slow link: it sends no sign of life. It goes on when P,
    by its own metrics, has given the blocks up and other prompts have gone through its pool. Where P keeps them, that
    wait ends too, and the answer must still be right."""
    reference = await case.prefill(case.prompt(LONG))
    async with case.reading(reference, _FREEZE_LIMIT_S):
        case.pair.freeze("decode")
        try:
            await asyncio.sleep(LEASE_S)
            await case.blocks_back("prefill")
            await case.fill("prefill")
        finally:
            case.pair.thaw("decode")


@row("lease-after", "lease runs out after the read, blocks reused")
async def lease_after(case: Case) -> None:
    """D is frozen after its first token, until P has given the blocks up and other prompts went through its pool."""
    reference = await case.prefill(case.prompt(max_tokens=_LONG_OUTPUT))
    async with case.answering(reference, _FREEZE_LIMIT_S) as work:
        case.pair.freeze("decode")
        try:
            await asyncio.sleep(LEASE_S)
            await case.blocks_back("prefill")
            await case.fill("prefill")
            # D may have given its last token before it stood still.
            check_under_way(work, "the answer")
        finally:
            case.pair.thaw("decode")


@row("p-killed-before", "P killed before the read")
async def prefill_killed_before(case: Case) -> None:
    """P is gone when D is asked. The engines have worked together before."""
    reference = await case.prefill(case.prompt())
    await case.pair.kill("prefill")
    await case.decode(reference)
    await case.plain("decode", "plain request to D")


@row("p-killed-during", "P killed during the read", hosts=True)
async def prefill_killed_during(case: Case) -> None:
    """P is killed when a tenth of the cache has come over the slow link."""
    reference = await case.prefill(case.prompt(LONG))
    async with case.reading(reference):
        await case.pair.kill("prefill")
    await case.plain("decode", "plain request to D")


@row("p-killed-after", "P killed after the read")
async def prefill_killed_after(case: Case) -> None:
    """P is killed when D has given its first token, and 199 are left."""
    reference = await case.prefill(case.prompt(max_tokens=_LONG_OUTPUT))
    async with case.answering(reference):
        await case.pair.kill("prefill")
    await case.plain("decode", "plain request to D")


async def _restart_prefill(case: Case) -> None:
    """P is killed and started again; then D gets a reference from P's former life and new ones."""
    reference = await case.prefill(case.prompt())
    await case.pair.kill("prefill")
    await case.pair.start("prefill")
    await case.fill("prefill")
    await case.decode(reference, "old reference")
    await case.hand_over("new hand-over")


@row("p-restarted", "P restarted on the same ports")
async def prefill_restarted(case: Case) -> None:
    """With the same command line: vLLM gives each start an engine id of its own."""
    await _restart_prefill(case)


@row("p-restarted-same-id", "P restarted on the same ports, with `engine_id` set")
async def prefill_restarted_same_id(case: Case) -> None:
    """As `p-restarted`, with an engine id in the configuration, which stays the same. D has worked with P under it."""
    case.pair.engine_ids["prefill"] = "matrix-prefill"
    await case.pair.kill("prefill")
    await case.pair.start("prefill")
    for _ in range(3):
        with contextlib.suppress(CannotRun):
            await case.works("before the restart")
            break
    else:
        raise CannotRun("a P with an engine id of its own never worked")
    await _restart_prefill(case)


@row("d-killed", "D killed during the read", hosts=True)
async def decode_killed(case: Case) -> None:
    """D is killed when a tenth of the cache has come over the slow link: P must go on and get its blocks back. What
    the client of the killed engine gets is not judged."""
    reference = await case.prefill(case.prompt(LONG))
    async with case.reading(reference):
        await case.pair.kill("decode")
    case.outcomes.clear()
    await case.plain("prefill", "plain request to P")


@row("d-restarted", "D restarted on the same ports")
async def decode_restarted(case: Case) -> None:
    """A prefill waits when D is killed, and is read by the D that was started in its place; the lease may have run
    out. Then comes a new hand-over."""
    reference = await case.prefill(case.prompt())
    await case.pair.kill("decode")
    await case.pair.start("decode")
    await case.decode(reference, "old reference")
    await case.hand_over("new hand-over")


@row("other-name-first", "another address of the host at the first contact", hosts=True)
async def other_name_first(case: Case) -> None:
    """A D that has not seen P is given P's host by its second address, then by name, then as P said."""
    await case.pair.kill("decode")
    await case.pair.start("decode")
    name, second = case.network.prefill.aliases
    for host in (second, name, None):
        reference = await case.prefill(case.prompt())
        changed = reference if host is None else reference.but(remote_host=host)
        await case.decode(changed, f"by {host or 'what P said'}")


@row("side-channel-garbage", "side channel fed with garbage")
async def side_channel_garbage(case: Case) -> None:
    """Garbage to P's side channel, then a D that has not asked it yet."""
    dice = random.Random(case.name)
    address = (case.network.prefill.address, case.pair.side_ports["prefill"])
    for number in range(GARBAGE):
        try:
            await asyncio.to_thread(_send_garbage, address, dice)
        except ConnectionRefusedError as problem:
            if number == 0:
                raise CannotRun(f"there is no side channel at {address[0]}:{address[1]}") from problem
            # Nobody listens any more: the hand-overs show what that means.
            break
    await case.pair.kill("decode")
    await case.pair.start("decode")
    # The first contact of a cold pair of engines may take longer than a connector waits.
    for number in range(3):
        await case.hand_over(f"hand-over {number + 1}")


def _send_garbage(address: tuple[str, int], dice: random.Random) -> None:
    """One connection with one message: raw bytes, frames of another number, or contents of another kind."""
    noise = dice.randbytes(dice.choice((0, 1, 7, 100, 5000)))
    kind = dice.randrange(7)
    try:
        client = Client(address, 10.0)
    except (ConnectionResetError, BrokenPipeError, TimeoutError):
        return
    query = msgpack.packb([b"get_meta_msg", 0, 0])
    content = {
        1: msgpack.packb([b"get_meta_msg", dice.randrange(1, 99), dice.randrange(-9, 99)]),
        2: msgpack.packb({"what": noise}),
        3: msgpack.packb([b"another_msg", 0, 0]),
        4: query[: dice.randrange(len(query))],
        5: noise,
    }.get(kind, noise)
    try:
        if kind == 0:
            # Instead of a message, after a right greeting.
            client.socket.sendall(noise or GREETING)
        elif kind == 6:
            # Without the empty frame that a REQ socket sends first.
            client.socket.sendall(frame(query))
        else:
            client.socket.sendall(frame(b"", more=True) + frame(content))
    except OSError:
        pass
    finally:
        client.close()


@row("firewall", "data ports firewalled", hosts=True)
async def firewall(case: Case) -> None:
    """A D that has no connections yet: only the HTTP ports and the side channels let new ones in. A plain request to D
    comes meanwhile. The firewall must have dropped something since D was asked."""
    ports = [*case.pair.ports.values(), *case.pair.side_ports.values()]
    await case.pair.kill("decode")
    case.network.firewall(ports)
    await case.pair.start("decode")
    reference = await case.prefill(case.prompt())
    dropped = case.network.dropped()
    work = asyncio.create_task(case.decode(reference, "behind the firewall"))
    try:
        await asyncio.sleep(FIREWALLED_S)
        await case.plain("decode", "plain request to D meanwhile")
        await work
    finally:
        work.cancel()
        await asyncio.wait({work})
    if case.network.dropped() == dropped:
        raise CannotRun("the firewall dropped nothing: nobody tried a data port, or its rule has no effect")


async def _three(case: Case) -> None:
    """Hand-overs between engines as they were started: the first meets a D that has not seen P."""
    for number, length in enumerate((600, 200, 1000), 1):
        await case.hand_over(f"hand-over {number}", length)


@row("block-128-64", "block size 128 at P, 64 at D", blocks=(None, 64), working=False)
async def blocks_shrink(case: Case) -> None:
    """Three hand-overs. 128 is vLLM's own."""
    await _three(case)


@row("block-32-64", "block size 32 at P, 64 at D", blocks=(32, 64), working=False)
async def blocks_grow(case: Case) -> None:
    """Three hand-overs."""
    await _three(case)
