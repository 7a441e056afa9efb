"""The rows of the fault matrix: which there are, and what they make of kv_transfer_params."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from lab.matrix.case import Reference
from lab.matrix.rows import all_rows, row
from lab.matrix.rows_requests import OUT_OF_RANGE, _moved, _other_type
from lab.servers.client import body, prompt_of


def test_each_fault_has_a_row_that_says_what_it_does() -> None:
    rows = all_rows()
    wanted = (
        "unknown-id blocks-out-of-range twice-in-turn twice-at-once sent-twice n-2 reused lease-before lease-during "
        "lease-after p-killed-before p-killed-during p-killed-after p-restarted d-killed d-restarted block-128-64 "
        "block-32-64 null-flags null-keys missing-keys typed-keys other-name firewall side-channel-garbage"
    )
    assert set(wanted.split()) <= set(rows)
    for name, found in rows.items():
        assert found.name == name
        assert inspect.getdoc(found.act)
    with pytest.raises(ValueError, match="two rows are named n-2"):
        row("n-2", "another")(rows["n-2"].act)


@pytest.mark.parametrize("value", [True, 5, "text", [[1, 2]], None, 1.5])
def test_another_type_is_one(value: Any) -> None:
    assert type(_other_type(value)) is not type(value)


def test_block_ids_keep_their_nesting() -> None:
    assert _moved([[1, 2], []]) == [[1 + OUT_OF_RANGE, 2 + OUT_OF_RANGE], []]


def test_prompts_differ_from_their_first_token_on() -> None:
    prompts = [prompt_of(f"p-{number}", 300, 8) for number in range(20)]
    assert len({prompt.tokens[:4] for prompt in prompts}) == len(prompts)
    assert body(prompts[0])["prompt"] == list(prompts[0].tokens)


def test_a_changed_reference_leaves_the_other_alone() -> None:
    reference = Reference(prompt_of("p", 10, 1), "id", {"remote_port": 1, "remote_host": "a"})
    changed = reference.but(remote_host="b")
    assert (reference.params["remote_host"], changed.params) == ("a", {"remote_port": 1, "remote_host": "b"})
