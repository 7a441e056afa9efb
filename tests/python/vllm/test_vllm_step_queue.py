"""Steps that grant leases wait for the device, with events that come when the test lets them."""

from __future__ import annotations

from typing import Any

import torch
from kvferry.vllm.step_queue import StepQueue, device_recorder


class Stream:
    """A device's work, which is over when the test says so."""

    def __init__(self) -> None:
        self.enqueued = self.over = 0

    def record(self) -> Recorded:
        """An event behind what is enqueued so far."""
        return Recorded(self, self.enqueued)


class Recorded:
    """An event of a `Stream`."""

    def __init__(self, stream: Stream, at: int) -> None:
        self._stream, self._at = stream, at

    def query(self) -> bool:
        """Whether the stream has come past it."""
        return self._stream.over >= self._at


def test_a_step_that_grants_waits_for_what_was_enqueued_before_it_came() -> None:
    stream, submitted = Stream(), list[bytes]()
    steps = StepQueue(submitted.append, stream.record)
    steps.add(b"plain", grants=False)
    assert submitted == [b"plain"], "nothing that it would wait for"
    stream.enqueued = 3
    steps.add(b"grants", grants=True)
    # What is enqueued later does not matter.
    stream.enqueued = 9
    for stream.over in range(3):
        steps.advance()
        assert submitted == [b"plain"]
    stream.over = 3
    steps.advance()
    assert submitted == [b"plain", b"grants"]


def test_steps_keep_their_order() -> None:
    stream, submitted = Stream(), list[bytes]()
    steps = StepQueue(submitted.append, stream.record)
    stream.enqueued = 1
    steps.add(b"1 grants", grants=True)
    steps.add(b"2 plain", grants=False)
    stream.enqueued = 2
    steps.add(b"3 grants", grants=True)
    steps.add(b"4 plain", grants=False)
    assert submitted == []
    stream.over = 1
    steps.add(b"5 plain", grants=False)
    assert submitted == [b"1 grants", b"2 plain"]
    stream.over = 2
    steps.advance()
    assert submitted == [b"1 grants", b"2 plain", b"3 grants", b"4 plain", b"5 plain"]


def test_a_cache_in_host_memory_is_written_when_the_step_comes() -> None:
    submitted = list[bytes]()
    record = device_recorder({"layer": torch.zeros(4)})
    assert record is None
    StepQueue(submitted.append, record).add(b"grants", grants=True)
    assert submitted == [b"grants"]


def test_the_event_is_of_the_caches_device_and_the_callers_stream(monkeypatch: Any) -> None:
    """With CUDA replaced: there is none here."""
    said: list[Any] = []

    class Event:
        def record(self, stream: Any) -> None:
            said.append(("record", stream))

        def query(self) -> bool:
            return False

    class Device:
        def __init__(self, device: Any) -> None:
            said.append(("device", device))

        def __enter__(self) -> None:
            said.append("enter")

        def __exit__(self, *_: object) -> None:
            said.append("exit")

    class Cache:
        device = torch.device("cuda", 3)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    caches: Any = {"first": Cache(), "second": Cache()}
    record = device_recorder(caches)
    assert record is not None
    assert not said
    submitted = list[bytes]()
    steps = StepQueue(submitted.append, record)
    steps.add(b"grants", grants=True)
    cuda = torch.device("cuda", 3)
    assert said == [("device", cuda), "enter", ("record", ("stream of", cuda)), "exit"]
    assert submitted == []
