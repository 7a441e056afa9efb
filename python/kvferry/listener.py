"""The handshake listener alone, for hosts that bring their own scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from . import _lib, _wire


class Listener(AbstractContextManager["Listener"]):
    """Serves the metadata of an engine's ranks to other engines. Bound when the constructor returns.

    Args:
        config: The keys of a listener, see `kvferry.settings`, `kvferry config --all` and docs/configuration.md. Only
            `engine_id` has no default.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self._handle = _lib.Handle("listener", _wire.pack("config", config))

    def offer(self, metadata: bytes) -> int:
        """Adds one rank's metadata and returns how many ranks are still missing."""
        return self._handle.number("uint32_t", "offer", _lib.data("metadata", metadata))

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that other engines are to be told."""
        return self._handle.address("address")

    def close(self) -> None:
        """Stops and frees the listener. Calling it again does nothing."""
        self._handle.free()

    def __exit__(self, *_: object) -> None:
        self.close()
