"""Queues steps for the rank's worker: one that grants leases waits until the granted blocks are written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A point in a device's stream of work."""

    def query(self) -> bool:
        """Tells whether the device has passed it. Does not wait."""


def device_recorder(kv_caches: Mapping[str, torch.Tensor]) -> Callable[[], Event] | None:
    """Returns a function that records an event behind all work that the calling thread has enqueued on the KV cache's
    device. None for a cache in host memory, which is written when the call that writes it has returned."""
    import torch

    devices = {cache.device for cache in kv_caches.values() if cache.device.type == "cuda"}
    if not devices:
        return None
    # A model runner has one device.
    (device,) = devices

    def record() -> Event:
        with torch.cuda.device(device):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
        recorded: Event = event
        return recorded

    return record


class StepQueue:
    """Hands steps to `submit` in their order.

    A worker reports a grant as soon as it has it, and consumers that await the prefill read then. But the scheduler
    grants a lease when it has seen the request's last token, which a model runner hands out before all of the cache is
    written: a drafter runs after the sampling, and on a device everything runs later than it is enqueued. When a step
    that grants comes, all that its finished requests write has been enqueued. So such a step, and all behind it, waits
    for an event recorded then. All calls come from the thread that enqueues, and none waits.

    Args:
        submit: Takes an encoded step.
        record: Records an event behind all work enqueued so far; None where there is no device.
    """

    def __init__(self, submit: Callable[[bytes], None], record: Callable[[], Event] | None) -> None:
        self._submit = submit
        self._record = record
        self._waiting: deque[tuple[Event | None, bytes]] = deque()

    def add(self, step: bytes, grants: bool) -> None:
        """Hands over a step, now or later. `grants`: whether it grants leases."""
        self._waiting.append((self._record() if grants and self._record is not None else None, step))
        self.advance()

    def flush(self) -> None:
        """Hands over all steps, for a worker that is about to end: nothing is read from it any more."""
        while self._waiting:
            self._submit(self._waiting.popleft()[1])

    def advance(self) -> None:
        """Hands over the steps that need not wait any more. To be called at every engine step."""
        while self._waiting:
            event, step = self._waiting[0]
            if event is not None and not event.query():
                return
            self._waiting.popleft()
            self._submit(step)
