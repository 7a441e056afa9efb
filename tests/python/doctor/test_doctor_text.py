"""The texts of `kvferry doctor`: its table, its remedies and its documentation."""

from __future__ import annotations

import os
import re

from commands import ROOT
from doctor_command import STATES_OF_TROUBLE
from kvferry.cli.doctor import table
from kvferry.doctor import KINDS, markdown
from kvferry.doctor.findings import found


def test_the_table_tells_states_and_remedies() -> None:
    shown = table(
        [
            found("ucx", "missing", ["1. the system's: refused"]),
            found("transports", "restricted", ["tcp/lo\x1b[2J"], settings="UCX_TLS", lost="cma"),
            found("gpu", "none"),
        ]
    )
    assert re.search(r"^problem +ucx +There is no usable UCX\.$", shown, re.MULTILINE)
    assert "- 1. the system's: refused" in shown
    assert "do: unset UCX_TLS, or add cma" in shown
    assert "\x1b" not in shown
    assert shown.endswith("\n0 ok, 1 warning, 1 problem, 1 not applicable")


def test_every_trouble_has_a_remedy_and_every_case_a_meaning() -> None:
    for id, kind in KINDS.items():
        assert kind.looks_at, id
        for name, case in kind.cases.items():
            assert case.meaning.endswith("."), (id, name)
            assert bool(case.remedy) == (case.state in STATES_OF_TROUBLE), (id, name)


def test_the_documentation_is_the_table_of_the_code() -> None:
    path = ROOT / "docs/doctor.md"
    start, end = "<!-- findings -->\n\n", "\n<!-- end -->"
    text = path.read_text()
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    fresh = before + start + markdown() + end + after
    if os.environ.get("KVFERRY_BLESS"):
        path.write_text(fresh)
    assert text == fresh, "run KVFERRY_BLESS=1 pytest tests/python/doctor -k documentation"
