"""What the demo takes for a failure. It is here because the demo's client needs vLLM's environment."""

from __future__ import annotations

from lab.demo.verdict import check_aborted
from lab.demo.workload import make_workload
from lab.servers.client import Answer


def test_a_request_that_fails_before_its_client_leaves_is_a_failure() -> None:
    workload = make_workload(6)
    answers = {prompt.name: Answer(aborted=True) for wave in workload.waves for prompt in wave}
    assert {prompt.abort for wave in workload.waves for prompt in wave} == {None, "decode", "load"}
    assert check_aborted(workload, answers) == []
    answers["abort-decode"] = Answer(error="HTTP 500: no block")
    assert check_aborted(workload, answers) == [
        "abort-decode, whose client leaves early, failed before that: HTTP 500: no block"
    ]
    # The others' errors are told in their own rows.
    answers["p00"] = Answer(error="HTTP 500")
    assert len(check_aborted(workload, answers)) == 1
