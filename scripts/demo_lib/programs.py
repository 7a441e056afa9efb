"""The proxies that `scripts/proxies` runs: where they are in vLLM's source, and how each is called."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

_SERVING = "examples/disaggregated/disaggregated_serving"


@dataclass(frozen=True)
class Program:
    """A proxy as vLLM has it."""

    path: str
    """In the source of the vLLM that is installed."""
    has_turns: bool = False
    """Whether it passes on what the decode engine answers for a conversation's next turn."""

    def arguments(self, port: int, prefill: int, decode: int) -> list[str]:
        """Its command line. All three listen at 127.0.0.1."""
        own = ["--host", "127.0.0.1", "--port", str(port)]
        hosts = ["--prefiller-host", "127.0.0.1", "--decoder-host", "127.0.0.1"]
        return [*own, *hosts, "--prefiller-port", str(prefill), "--decoder-port", str(decode)]


PROGRAMS = {
    "toy": Program("tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"),
    "multi-turn": Program(f"{_SERVING}/disagg_proxy_multiturn.py", has_turns=True),
}

CONNECTORS = ("kvferry", "stock")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of `scripts/proxies`."""
    parser = argparse.ArgumentParser(
        prog="scripts/proxies",
        description="Runs vLLM's own proxies, as they are, before a prefill and a decode server, and compares every "
        "token with what the decode server says by itself. Through the multi-turn proxy, conversations go on: with the "
        "history as it was, and with a part of the last answer left out, as clients do that strip reasoning. Exit "
        "status 0: all tokens are equal.",
    )
    parser.add_argument("--connector", choices=CONNECTORS, default="kvferry", help="the servers' (default kvferry)")
    parser.add_argument(
        "--only", action="append", choices=[*PROGRAMS], help="this proxy; may be repeated (default: all)"
    )
    parser.add_argument(
        "--installed",
        choices=("prefill", "decode"),
        help="this server is of the installed vLLM, the other of the newest, as both are without this option",
    )
    parser.add_argument("--conversations", type=int, default=4, help="of two turns, of each kind (default 4)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    parse_options()
