"""Cells of the fault matrix whose rows do not come to their end: what was seen counts, a hang above all."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import aiohttp
import pytest
from chaos_lib.matrix_network import Host
from chaos_lib.matrix_pair import Pair
from chaos_lib.matrix_peers import PEERS
from demo_lib.servers import ServerFailed, free_port


async def _forget_on_a_dead_server() -> None:
    async with aiohttp.ClientSession() as session:
        host = Host("127.0.0.1", (), "lo")
        network = SimpleNamespace(prefill=host, decode=host)
        pair = Pair(SimpleNamespace(session=session), network, None, PEERS["kvferry"])
        pair.ports["decode"] = free_port()
        await pair.forget("decode")


def test_forgetting_fails_on_a_dead_server_as_other_requests_do() -> None:
    with pytest.raises(ServerFailed, match="reset_prefix_cache on the decode engine: ClientConnectorError"):
        asyncio.run(_forget_on_a_dead_server())
