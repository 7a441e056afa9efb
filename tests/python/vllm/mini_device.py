"""A device in place of a GPU: it writes into its memory later than told, and vLLM's platform copies blocks of it."""

from __future__ import annotations

from collections import deque
from typing import Any

from mini_config import HostBuffer


class Stream:
    """The device's work, in the order in which it was enqueued. Nothing is done before somebody waits for it.

    It takes the place of vLLM's platform for `copy_kv_blocks`, whose copies wait, as those of GPUs do.

    Args:
        copies: Which of the copies are made.
    """

    def __init__(self, copies: HostBuffer) -> None:
        from vllm.platforms import current_platform

        self._work: deque[tuple[Any, Any, Any]] = deque()
        self._copies = copies
        platform: Any = type(current_platform)
        platform.swap_out_blocks_to_host = classmethod(
            lambda _, *blocks: self._copy(*blocks) if copies != "not saved" else None
        )
        platform.insert_blocks_to_device = classmethod(
            lambda _, *blocks: self._copy(*blocks) if copies != "not filled" else None
        )

    def enqueue(self, view: Any, where: Any, content: Any) -> None:
        """`view[where] = content`, later."""
        self._work.append((view, where, content))

    def synchronize(self) -> None:
        """Does all that is enqueued."""
        while self._work:
            view, where, content = self._work.popleft()
            view[where] = content

    def _copy(self, source: Any, target: Any, there: Any, here: Any) -> None:
        self.synchronize()
        assert source.data_ptr() != target.data_ptr()
        target[here] = source[there]
