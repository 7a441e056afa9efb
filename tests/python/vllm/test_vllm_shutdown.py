"""Engines that end in good order while transfers are under way: no hang, no error, and the other side goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from mini_trio import FRAIL_LEASE_MS, P_SALT, POLICIES, Trio, prompt


def test_shutdown_with_transfers_in_flight(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = Trio(tmp_path, hybrid=True)
    leaving, staying = (own.decode[policy] for policy in POLICIES)
    for decode in (leaving, staying):
        own.works(decode)

    # A decode engine ends in the middle of its loads, which cannot end by themselves.
    third = own.add_producer(P_SALT, FRAIL_LEASE_MS)
    known = prompt(169, 60)
    leaving.call("add", "known", known, 4, own.prefilled(third, "known", known))
    own.answer(leaving, "known")
    words = [prompt(170 + at, 300) for at in range(3)]
    params = [own.prefilled(third, f"left-{at}", words[at]) for at in range(3)]
    third.freeze()
    for at in range(3):
        leaving.call("add", f"left-{at}", words[at], 4, params[at])
        own.loading(leaving, f"left-{at}")
    leaving.close()
    third.thaw()
    own.whole(third)

    # A prefill engine ends while another decode engine loads from it.
    fourth = own.frail
    params = [own.prefilled(fourth, f"right-{at}", words[at]) for at in range(3)]
    for at in range(3):
        staying.call("add", f"right-{at}", words[at], 4, params[at])
        own.loading(staying, f"right-{at}")
    fourth.close()
    for at in range(3):
        assert own.answer(staying, f"right-{at}")["reason"] == "length"
    own.works(staying)

    # And with blocks that it keeps for somebody who has not come yet.
    own.prefilled(third, "kept", prompt(175, 100))
    third.close()
    own.prefilled(own.steady, "kept-too", prompt(176, 100))
    own.close()
    assert [engine.exit_code for engine in (leaving, staying, third, fourth, own.steady)] == [0] * 5
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    assert "panicked" not in out + err
