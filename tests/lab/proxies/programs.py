"""The proxies that `scripts/proxies` runs: where they are, and how each is called."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

_EXAMPLES = "examples/disaggregated"
_SERVING = f"{_EXAMPLES}/disaggregated_serving"
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Where everything is; all of it listens at `HOST`. Ports, and the name of the prefill engine."""

    proxy: int
    metrics: int
    """For the proxy's own metrics, of a proxy that has some."""
    prefill: int
    decode: int
    engine_id: str
    listener: int
    bootstrap: int


def _hosts(place: Place) -> list[str]:
    own = ["--host", HOST, "--port", str(place.proxy), "--prefiller-host", HOST, "--decoder-host", HOST]
    return [*own, "--prefiller-port", str(place.prefill), "--decoder-port", str(place.decode)]


def _push(place: Place) -> list[str]:
    servers = ["--prefill", f"{HOST}:{place.prefill}", "--decode", f"{HOST}:{place.decode}", "--model", "any"]
    engine = ["--prefill-engine-id", place.engine_id, "--prefill-kv-host", HOST]
    return [*servers, *engine, "--prefill-side-channel-port", str(place.listener), "--port", str(place.proxy)]


def _mooncake(place: Place) -> list[str]:
    prefill = ["--prefill", f"http://{HOST}:{place.prefill}", str(place.bootstrap)]
    return ["--host", HOST, "--port", str(place.proxy), *prefill, "--decode", f"http://{HOST}:{place.decode}"]


def _router(connector: str) -> Callable[[Place], list[str]]:
    def arguments(place: Place) -> list[str]:
        own = ["--host", HOST, "--port", str(place.proxy), "--prometheus-port", str(place.metrics)]
        own += ["--vllm-pd-disaggregation", "--kv-connector", connector, "--policy", "round_robin"]
        prefill = ["--prefill", f"http://{HOST}:{place.prefill}"]
        if connector == "mooncake":
            prefill.append(str(place.bootstrap))
        own += ["--worker-startup-check-interval", "1"]
        return [*own, *prefill, "--decode", f"http://{HOST}:{place.decode}"]

    return arguments


@dataclass(frozen=True)
class Program:
    """A proxy as it is published."""

    arguments: Callable[[Place], list[str]]
    """Its command line."""
    path: str | None = None
    """In the source of the vLLM that is run; None: it is vllm-router, of its own package."""
    has_turns: bool = False
    """Whether it passes on what the decode engine answers for a conversation's next turn."""
    as_push: bool = False
    """Whether the prefill server must pass for one with `NixlPushConnector`, so that both are asked at once."""
    with_stock: bool = False
    """Whether it also runs before `NixlConnector`."""


PROGRAMS = {
    "toy": Program(_hosts, "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py", with_stock=True),
    "multi-turn": Program(_hosts, f"{_SERVING}/disagg_proxy_multiturn.py", has_turns=True, with_stock=True),
    "push": Program(_push, f"{_SERVING}/disagg_proxy_pushconnector_demo.py", as_push=True),
    "mooncake": Program(_mooncake, f"{_EXAMPLES}/mooncake_connector/mooncake_connector_proxy.py"),
    "router-nixl": Program(_router("nixl"), with_stock=True),
    "router-mooncake": Program(_router("mooncake")),
    "router-push": Program(_router("nixl"), as_push=True),
}

CONNECTORS = ("kvferry", "stock")
AT_ONCE = "at-once"
"""A proxy of ours, which asks both servers at the same time: requests of every kind."""
STATEFUL = "mamba2"
"""The model with recurrent states and attention of which vLLM on a CPU gives the same tokens prefilled as decoded."""


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of `scripts/proxies`."""
    parser = argparse.ArgumentParser(
        prog="scripts/proxies",
        description="Runs proxies of the field, as they are, before a prefill and a decode server: vLLM's own, and "
        "vllm-router. Compares every token with what the decode server says by itself. Through the multi-turn proxy, "
        "conversations go on: with the history as it was, and with a part of the last answer left out, as clients do "
        "that strip reasoning. Exit status 0: all tokens are equal.",
    )
    parser.add_argument("--connector", choices=CONNECTORS, default="kvferry", help="the servers' (default kvferry)")
    parser.add_argument(
        "--only", action="append", choices=[*PROGRAMS, AT_ONCE], help="this proxy; may be repeated (default: all)"
    )
    parser.add_argument(
        "--installed",
        choices=("prefill", "decode"),
        help="this server is of the installed vLLM, the other of the newest, as both are without this option",
    )
    parser.add_argument(
        "--model",
        choices=("llama", STATEFUL),
        default="llama",
        help="mamba2 has recurrent states: only requests of every kind, and so many at once that the decode server "
        "preempts some (default llama)",
    )
    parser.add_argument("--conversations", type=int, default=4, help="of two turns, of each kind (default 4)")
    options = parser.parse_args(arguments)
    fitting = [*PROGRAMS, AT_ONCE]
    if options.connector == "stock":
        fitting = [name for name, program in PROGRAMS.items() if program.with_stock]
    if options.model == STATEFUL:
        fitting = [name for name in fitting if name in ("toy", AT_ONCE)]
    options.only = [name for name in options.only or fitting if name in fitting]
    if not options.only:
        parser.error(f"--connector {options.connector} --model {options.model} goes with {', '.join(fitting)}")
    return options


if __name__ == "__main__":
    parse_options()
