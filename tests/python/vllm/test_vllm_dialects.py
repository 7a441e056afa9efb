"""Requests as proxies for vLLM's other connectors send them, through two engines with every byte checked.

The requests are recorded from these programs:

| program | where it makes them |
| --- | --- |
| `disagg_proxy_pushconnector_demo.py`, `mooncake_connector_proxy.py` | vLLM 0.33.0, examples/disaggregated |
| vllm-router 0.1.17 | src/routers/http/vllm_pd_router.rs |
| llm-d-router | pkg/sidecar/proxy: connector_nixlv2.go, nixl_push_identity.go, connector_mooncake.go |
| AIBrix | pkg/plugins/gateway/algorithms/pd/transfer/shfs.go |
| production-stack | src/vllm_router/services/request_service/request.py |
| Ray Serve 2.60 | ray/llm/_internal/serve/engines/vllm/kv_transfer/base.py |
"""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import kvferry
import pytest
from kvferry.vllm import bootstrap, bootstrap_port, dialects, scheduler
from kvferry.vllm.config import parse_options
from lab.common import free_port
from test_vllm_engines import Pair, prompt

ASKED = {
    **{"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None},
    **{"remote_host": None, "remote_port": None},
}
"""What all of them ask a prefill engine that may have `NixlConnector`."""
LOAD = {"do_remote_prefill": True, "do_remote_decode": False}
PLACE = ("remote_engine_id", "remote_host", "remote_port")

Params = dict[str, Any]


def words(name: str, count: int) -> list[int]:
    """A prompt of its own, of which no engine has a prefix."""
    return prompt(zlib.crc32(name.encode()), count)


class Engines(Pair):
    """A prefill and a decode engine, and what a proxy knows of the first."""

    def __init__(self, folder: Any, **extra: Any) -> None:
        self.bootstrap_port = free_port()
        extra = {"bootstrap_port": self.bootstrap_port, **extra}
        super().__init__(folder, "fail", False, False, prefill={"extra": extra})
        # Of an earlier answer.
        self.known = self.asked("chatcmpl-first-00000000", prompt(1, 20), ASKED)
        self.decoded("chatcmpl-first-11111111", prompt(1, 20), self.known)
        self.quiesce()

    def asked(self, request: str, tokens: list[int], params: Params) -> Params:
        """What the prefill engine answers, as JSON brings it."""
        self.prefill.call("add", request, tokens, 1, params)
        self.prefill.call("run_until", f"'reason' in e.answers.get('{request}', {{}})")
        answer: Params = json.loads(json.dumps(self.prefill.call("answer", request)["params"]))
        self.prefill.call("step")
        return answer

    def ended(self, prefill: str, *requests: str) -> None:
        """The decode engine has answered, while the prefill engine goes on as vLLM does that keeps blocks."""
        self.prefill.start("run_until", f"'{prefill}' not in e.scheduler.requests")
        for request in requests:
            self.decode.call("run_until", f"'reason' in e.answers.get('{request}', {{}})")
            assert self.decode.call("answer", request)["reason"] == "length"
        self.prefill.result("run_until")

    def is_right(self, prefill: str, request: str, tokens: list[int]) -> None:
        """All but the last token came from the prefill engine, every byte of them, and nothing is left behind."""
        self.ended(prefill, request)
        decode = self.quiesce()[1]
        assert (decode["starts"][request][0], decode["wrong_bytes"][request]) == (len(tokens) - 1, 0)

    def place(self) -> Params:
        return {key: self.known[key] for key in PLACE}

    def bootstrapped(self) -> Params:
        """What a proxy of Mooncake's dialect tells of this prefill engine."""
        address = f"http://127.0.0.1:{self.bootstrap_port}"
        with urllib.request.urlopen(f"{address}/query", timeout=20) as response:
            ranks = json.load(response)
        assert list(ranks) == ["0"]
        return {"remote_bootstrap_addr": address, "remote_engine_id": ranks["0"]["engine_id"]}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("model"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def pushing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("model"), push_dialect=True)
    yield made
    made.close()


def ids(header: str, kind: str = "cmpl") -> tuple[str, str]:
    """What the two engines call a request with this `X-Request-Id`."""
    rest = f"{header}-0" if kind == "cmpl" else header
    return f"{kind}-{rest}-0a1b2c3d", f"{kind}-{rest}-ffeeddcc"


def name_in_both(request: str, answer: Params) -> str:
    """What a decode engine calls a prefill that has no other name."""
    return f"{request[:-9]}#{answer['remote_prompt_digest']}"


# --- one after the other


def _as_go_numbers(answer: Params) -> Params:
    """Through Go's `map[string]any`, whose numbers are floats, and back."""

    def whole(text: str) -> int:
        return int(float(text))

    passed: Params = json.loads(json.dumps(answer), parse_int=whole)
    return passed


def _pushed_by_router(answer: Params) -> Params:
    """vllm-router's params for a decode engine after an answer with `transfer_mode` `push`; without the id."""
    return {**LOAD, **{key: answer[key] for key in (*PLACE, "tp_size")}}


IN_TURN: dict[str, Callable[[Params], Params]] = {
    "whole": dict,
    "production-stack": lambda answer: {**answer, "remote_host": "localhost"},
    "aibrix": lambda answer: {**_as_go_numbers(answer), "remote_host": "127.0.0.1"},
}
"""What the decode engine is given of the prefill engine's answer. vllm-router, llm-d and Ray Serve pass it on whole."""


@pytest.mark.parametrize("program", IN_TURN)
@pytest.mark.parametrize("kind", ["cmpl", "chatcmpl"])
def test_one_engine_after_the_other(engines: Engines, program: str, kind: str) -> None:
    prefill, decode = ids(f"5b0c-{program}", kind)
    tokens = words(prefill, 90)
    answer = engines.asked(prefill, tokens, ASKED)
    assert (answer["transfer_mode"], answer["remote_request_id"]) == ("pull", name_in_both(prefill, answer))
    engines.decode.call("add", decode, tokens, 4, IN_TURN[program](answer))
    engines.is_right(prefill, decode, tokens)


def test_the_first_request_of_a_router_that_knows_pushes(pushing: Engines) -> None:
    """vllm-router rebuilds the params; llm-d's passes them on, with the name that both engines are given."""
    for program in ("vllm-router", "llm-d"):
        header = f"first-{program}"
        tokens = words(header, 75)
        prefill, decode = ids(header)
        name = {"transfer_id": f"xfer-{header}"} if program == "llm-d" else {}
        answer = pushing.asked(prefill, tokens, {**ASKED, **name})
        assert answer["transfer_mode"] == "push"
        passed = {**answer, **name} if name else {**_pushed_by_router(answer), "remote_request_id": header}
        pushing.decode.call("add", decode, tokens, 4, passed)
        pushing.is_right(prefill, decode, tokens)


def test_vllm_routers_way_with_mooncake(engines: Engines) -> None:
    prefill, decode = ids("mooncake-router")
    tokens = words(prefill, 80)
    name = {"transfer_id": "xfer-mooncake-router"}
    engines.asked(prefill, tokens, {"do_remote_decode": True, "do_remote_prefill": False, **name})
    engines.decode.call("add", decode, tokens, 4, {**LOAD, **name, **engines.bootstrapped()})
    engines.is_right(prefill, decode, tokens)


# --- both at once


def _push_demo(engines: Engines, header: str) -> tuple[Params, Params]:
    sizes = {"tp_size": 1, "pp_size": 1}
    return ASKED, {**LOAD, **engines.place(), **sizes, "remote_request_id": header}


def _router_push(engines: Engines, header: str) -> tuple[Params, Params]:
    return ASKED, {**_pushed_by_router(engines.known), "remote_request_id": header}


def _llm_d_push(engines: Engines, header: str) -> tuple[Params, Params]:
    name = {"transfer_id": f"xfer-{header}"}
    sizes = {key: engines.known[key] for key in ("tp_size", "pp_size", "dcp_size", "transfer_mode")}
    return {**ASKED, **name}, {**engines.place(), **sizes, **LOAD, "remote_request_id": header, **name}


def _mooncake(engines: Engines, header: str) -> tuple[Params, Params]:
    name = {"transfer_id": f"xfer-{header}"}
    asked = {"do_remote_decode": True, "do_remote_prefill": False, **name}
    return asked, {"do_remote_decode": False, "do_remote_prefill": True, **engines.bootstrapped(), **name}


AT_ONCE: dict[str, Callable[[Engines, str], tuple[Params, Params]]] = {
    "push-demo": _push_demo,
    "vllm-router-push": _router_push,
    "llm-d-push": _llm_d_push,
    "mooncake": _mooncake,
}


@pytest.mark.parametrize("program", AT_ONCE)
@pytest.mark.parametrize("kind", ["cmpl", "chatcmpl"])
def test_both_engines_at_once(pushing: Engines, program: str, kind: str) -> None:
    header = f"___prefill_addr_127.0.0.1:8100___decode_addr_127.0.0.1:8200_{kind}-{program}"
    prefill, decode = ids(header, kind)
    tokens = words(header, 100)
    asked, load = AT_ONCE[program](pushing, header)
    pushing.decode.call("add", decode, tokens, 4, load)
    for _ in range(20):
        pushing.decode.call("step")
    assert "WAITING_FOR_REMOTE_KVS" in pushing.decode.call("state")["requests"][decode]
    pushing.asked(prefill, tokens, asked)
    pushing.is_right(prefill, decode, tokens)


@pytest.mark.parametrize("kind", ["cmpl", "chatcmpl"])
def test_a_push_proxy_needs_no_setting(engines: Engines, kind: str) -> None:
    """One that asks both engines at once, whatever the prefill engine answers."""
    header = f"unset-{kind}"
    prefill, decode = ids(header, kind)
    tokens = words(header, 100)
    asked, load = _push_demo(engines, header)
    engines.decode.call("add", decode, tokens, 4, load)
    assert engines.asked(prefill, tokens, asked)["transfer_mode"] == "pull"
    engines.is_right(prefill, decode, tokens)


@pytest.mark.parametrize("program", ["push-demo", "mooncake"])
def test_a_prefill_that_is_aborted_ends_the_load(pushing: Engines, program: str) -> None:
    prefill, decode = ids(f"aborted-{program}")
    tokens = words(prefill, 60)
    asked, load = AT_ONCE[program](pushing, f"aborted-{program}")
    pushing.decode.call("add", decode, tokens, 4, load)
    for _ in range(20):
        pushing.decode.call("step")
    assert "WAITING_FOR_REMOTE_KVS" in pushing.decode.call("state")["requests"][decode]
    pushing.prefill.call("add", prefill, tokens, 1, asked)
    pushing.prefill.call("abort", prefill)
    pushing.prefill.call("run_while_needed")
    pushing.decode.call("run_until", f"'reason' in e.answers.get('{decode}', {{}})")
    assert pushing.decode.call("answer", decode)["reason"] == "error"
    pushing.quiesce()


def test_samples_of_a_request_that_is_pushed(pushing: Engines) -> None:
    prefill, decode = ids("samples")
    tokens = words(prefill, 70)
    asked, load = AT_ONCE["push-demo"](pushing, "samples")
    samples = [f"{index}_{decode}" for index in range(2)]
    for sample in samples:
        pushing.decode.call("add", sample, tokens, 4, load)
    pushing.asked(prefill, tokens, asked)
    pushing.ended(prefill, *samples)
    decode_state = pushing.quiesce()[1]
    assert [decode_state["wrong_bytes"][sample] for sample in samples] == [0, 0]


@pytest.mark.parametrize("program", ["mooncake", "llm-d-push", "push-demo"])
def test_several_prompts_of_one_completion(pushing: Engines, program: str) -> None:
    """All of them have what the proxy gives the completion; each is its own to the engines."""
    header = f"several-{program}"
    tokens = [words(f"{header}-{number}", 90 - 20 * number) for number in range(3)]
    asked, load = AT_ONCE[program](pushing, header)
    for number, prompt_ids in enumerate(tokens):
        pushing.decode.call("add", f"cmpl-{header}-{number}-1000000{number}", prompt_ids, 4, load)
    for number in (1, 0, 2):
        pushing.asked(f"cmpl-{header}-{number}-0000000{number}", tokens[number], asked)
    for number in range(3):
        pushing.ended(f"cmpl-{header}-{number}-0000000{number}", f"cmpl-{header}-{number}-1000000{number}")
    state = pushing.quiesce()[1]
    assert [state["wrong_bytes"][f"cmpl-{header}-{number}-1000000{number}"] for number in range(3)] == [0, 0, 0]


def test_the_answer_to_another_prompt_is_not_loaded(engines: Engines) -> None:
    """vLLM answers several prompts of a completion with the params of the first. The others are computed; any other
    request is refused. Either leaves the lease of the first as it is."""
    tokens, other = words("first-of-two", 80), words("second-of-two", 60)
    prefill, decode = ids("of-two")
    answer = engines.asked(prefill, tokens, ASKED)
    for request_id in ("cmpl-of-two-1-00000000", "chatcmpl-of-two-00000000"):
        engines.decode.call("add", request_id, other, 4, answer)
        engines.decode.call("run_until", f"'reason' in e.answers.get('{request_id}', {{}})")
    assert engines.decode.call("answer", "cmpl-of-two-1-00000000")["reason"] == "length"
    assert engines.decode.call("state")["starts"]["cmpl-of-two-1-00000000"][0] == 0
    assert engines.decode.call("answer", "chatcmpl-of-two-00000000")["reason"] == "error"
    engines.decode.call("add", decode, tokens, 4, answer)
    engines.is_right(prefill, decode, tokens)


def test_a_prefill_that_is_aborted_beside_another_of_its_name(pushing: Engines) -> None:
    """As when a proxy gives up an attempt and makes another: only the last one's end is told."""
    header, tokens = "attempts", words("attempts", 65)
    prefill, decode = ids(header)
    asked, load = AT_ONCE["push-demo"](pushing, header)
    pushing.decode.call("add", decode, tokens, 4, load)
    for _ in range(20):
        pushing.decode.call("step")
    for request_id in ("cmpl-attempts-0-00000001", prefill):
        pushing.prefill.call("add", request_id, tokens, 1, asked)
    pushing.prefill.call("abort", "cmpl-attempts-0-00000001")
    pushing.prefill.call("run_until", f"'reason' in e.answers.get('{prefill}', {{}})")
    pushing.is_right(prefill, decode, tokens)


@pytest.mark.parametrize("first", ["earlier", "later"])
def test_a_header_that_is_used_again_brings_nobody_anothers_prompt(pushing: Engines, first: str) -> None:
    """Two prompts with one header at the same time: each decode request awaits its own."""
    header = f"again-{first}"
    tokens = [words(f"{header}-{number}", 60 + 30 * number) for number in range(2)]
    prefills = [f"cmpl-{header}-0-0000000{number}" for number in range(2)]
    decodes = [f"cmpl-{header}-0-1000000{number}" for number in range(2)]
    asked, load = AT_ONCE["push-demo"](pushing, header)
    for decode, prompt_ids in zip(decodes, tokens, strict=True):
        pushing.decode.call("add", decode, prompt_ids, 4, load)
    for number in (0, 1) if first == "earlier" else (1, 0):
        pushing.asked(prefills[number], tokens[number], asked)
        pushing.ended(prefills[number], decodes[number])
    state = pushing.quiesce()[1]
    found = {decode: (state["starts"][decode][0], state["wrong_bytes"][decode]) for decode in decodes}
    assert found == {decode: (len(each) - 1, 0) for decode, each in zip(decodes, tokens, strict=True)}


def test_two_prefills_of_one_prompt_and_header_are_both_kept(pushing: Engines) -> None:
    """The later one cannot have the name, which is in use, and goes by its own id."""
    tokens = words("twice", 50)
    requests = ["cmpl-twice-0-00000001", "cmpl-twice-0-00000002"]
    answers = [pushing.asked(request, tokens, ASKED) for request in requests]
    assert answers[0]["remote_request_id"].startswith("cmpl-twice-0#")
    assert answers[1]["remote_request_id"] == requests[1]
    for number in (1, 0):
        decode = f"cmpl-twice-0-1000000{number}"
        pushing.decode.call("add", decode, tokens, 4, answers[number])
        pushing.decode.call("run_until", f"'reason' in e.answers.get('{decode}', {{}})")
        assert pushing.decode.call("answer", decode)["reason"] == "length"
    state = pushing.quiesce()[1]
    assert [state["wrong_bytes"][f"cmpl-twice-0-1000000{number}"] for number in range(2)] == [0, 0]


def test_a_request_that_comes_again_after_its_client_left(pushing: Engines) -> None:
    header, tokens = "left", words("left", 55)
    pushing.prefill.call("add", f"cmpl-{header}-0-00000001", tokens, 1, ASKED)
    pushing.prefill.call("abort", f"cmpl-{header}-0-00000001")
    pushing.prefill.call("run_while_needed")
    prefill, decode = ids(header)
    answer = pushing.asked(prefill, tokens, ASKED)
    pushing.decode.call("add", decode, tokens, 4, answer)
    pushing.is_right(prefill, decode, tokens)


# --- what is none of ours


@pytest.mark.parametrize("odd", ["text", ["do_remote_prefill"], 7])
def test_params_that_are_no_map_are_not_ours(odd: Any) -> None:
    assert scheduler._params_with(SimpleNamespace(request_id="r", kv_transfer_params=odd), "do_remote_prefill") is None


def test_an_answer_of_vllms_push_connector_is_refused(pushing: Engines) -> None:
    """It has no incarnation. The same answer, as it came, is loaded afterwards."""
    prefill, decode = ids("nixls")
    tokens = words("nixls", 40)
    answer = pushing.asked(prefill, tokens, ASKED)
    pushing.decode.call("add", "refused", tokens, 4, {**answer, "remote_incarnation": None})
    pushing.decode.call("run_until", "'reason' in e.answers.get('refused', {})")
    assert pushing.decode.call("answer", "refused")["reason"] == "error"
    pushing.decode.call("add", decode, tokens, 4, answer)
    pushing.is_right(prefill, decode, tokens)


# --- the bootstrap server


def answered(port: int, path: str, body: bytes | None = None) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data=body, timeout=20) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def parallel(rank: int, local: bool) -> Any:
    """Of the rank that counts: within the host where it has an API server of its own, otherwise over all hosts."""
    return SimpleNamespace(
        local_engines_only=local,
        data_parallel_rank_local=rank if local else 0,
        data_parallel_index=rank + 4 if local else rank,
    )


def known(**ranks: str) -> Any:
    return {rank.removeprefix("r"): {"engine_id": name, "worker_addr": {}} for rank, name in ranks.items()}


@pytest.mark.parametrize("local", [False, True], ids=["internal", "per-node"])
@pytest.mark.parametrize("first", [0, 1])
def test_data_parallel_ranks_are_known_to_the_first_ones_server(local: bool, first: int) -> None:
    """In whatever order they start, and again when one is started again."""
    port = free_port()
    options = parse_options({"bootstrap_port": port})
    made = []
    try:
        for rank in (first, 1 - first):
            made.append(bootstrap.announce(parallel(rank, local), options, f"e_dp{rank}@h:{rank}"))
        expected = known(r0="e_dp0@h:0", r1="e_dp1@h:1")
        wait_for(lambda: answered(port, "/query") == (200, expected))
        made.append(bootstrap.announce(parallel(1, local), options, "anew@h:1"))
        wait_for(lambda: answered(port, "/query") == (200, known(r0="e_dp0@h:0", r1="anew@h:1")))
    finally:
        for each in [*made, *made]:
            each.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port)).close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[" * 4000,
        b'{"dp_rank": 1}',
        b'{"dp_rank": true, "engine_id": "e"}',
        b'{"dp_rank": "1", "engine_id": "e"}',
        b'{"dp_rank": 1, "engine_id": 1}',
        b'{"dp_rank": -1, "engine_id": "e"}',
        b'{"dp_rank": 4096, "engine_id": "e"}',
        b'{"dp_rank": 1, "engine_id": "' + b"e" * 5000 + b'"}',
    ],
    ids=lambda body: body[:40].decode(),
)
def test_what_is_registered_is_checked(body: bytes) -> None:
    server = bootstrap.BootstrapServer(0, "127.0.0.1")
    try:
        status, answer = answered(server.port, "/register", body)
        assert status == 400
        assert "dp_rank" in answer["detail"]
        assert answered(server.port, "/query") == (200, {})
        assert answered(server.port, "/elsewhere")[0] == 404
    finally:
        server.close()


def test_ranks_of_other_hosts_cannot_register() -> None:
    server = bootstrap.BootstrapServer(0, "127.0.0.1")
    try:
        with socket.socket() as s:
            s.bind(("127.0.0.9", 0))
            s.connect(("127.0.0.1", server.port))
            body = b'{"dp_rank": 1, "engine_id": "e"}'
            s.sendall(b"POST /register HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            assert s.recv(100).split()[1] == b"404"
        assert answered(server.port, "/query") == (200, {})
    finally:
        server.close()


def test_a_crowd_takes_no_more_than_its_share() -> None:
    """Connections that say nothing; those beyond the limit are closed, and the rest when they have stalled."""
    server = bootstrap.BootstrapServer(0, "127.0.0.1", {0: "e"})
    crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3 * bootstrap.MOST_CONNECTIONS)]
    try:
        for s in crowd:
            s.settimeout(60)
            assert s.recv(1) == b""

        def is_answered() -> bool:
            try:
                return answered(server.port, "/query") == (200, known(r0="e"))
            except OSError:
                return False

        wait_for(is_answered)
    finally:
        for s in crowd:
            s.close()
        server.close()


def test_an_answer_of_the_nixl_connector_is_named() -> None:
    request: Any = SimpleNamespace(request_id="r", abort_immediately=False)
    answer = {**LOAD, "remote_block_ids": [[1]], "remote_engine_id": "p", "remote_blocks_expiry_time": 12.5}
    with pytest.raises(kvferry.InvalidArgumentError, match="an answer of vLLM's NixlConnector") as caught:
        dialects.understood(request, answer)
    assert "run KvferryConnector on the prefill engine too" in str(caught.value)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(kvferry.InvalidArgumentError, match=f"bootstrap_port {port} of 127.0.0.1 cannot be bound"):
            bootstrap.BootstrapServer(port, "127.0.0.1")


@pytest.mark.parametrize(
    ("extra", "bound"),
    [({}, None), ({"bind": "10.0.0.7"}, "10.0.0.7"), ({"host": "127.0.0.1"}, "127.0.0.1"), ({"host": "node"}, None)],
)
def test_what_confines_the_listener_confines_it_too(extra: Params, bound: str | None) -> None:
    assert bootstrap_port.bound(parse_options(extra)) == bound
