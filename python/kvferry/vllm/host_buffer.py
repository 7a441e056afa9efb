"""A copy of the KV cache in host memory, for devices whose memory kvferry cannot read or write.

With vLLM's `kv_buffer_device` `cpu`, a worker registers host memory laid out as the device's caches are. A block has
the same id in both, and vLLM's platform copies it: to the host when a finished prefill's lease is about to be granted,
to the device when a load has ended. The rest of the connector sees a cache in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.utils.gpu_sync_debug import gpu_sync_allowed

if TYPE_CHECKING:
    import torch

    from .geometry import Layer

CopyBlocks = Callable[[dict[str, Any], dict[str, Any], list[int], list[int], str], None]
"""vLLM's `CopyBlocksOp`: takes caches to copy from and to, block ids in either, and `d2h` or `h2d`. A copy comes after
all that is enqueued on the current stream; `d2h` is complete when it returns, `h2d` comes before later work on the
stream."""

Blocks = tuple[tuple[int, ...], ...]
"""Block ids by transferred KV-cache group."""


@dataclass(frozen=True)
class Copies:
    """What a step has to be copied.

    Attributes:
        saved: Blocks of prefills whose leases this step or a later one grants.
        filled: Blocks that a load fills, by request.
    """

    saved: tuple[Blocks, ...] = ()
    filled: Mapping[str, Blocks] = field(default_factory=dict)


class CopyList:
    """The scheduler side's part: collects what the next step has to copy."""

    def __init__(self) -> None:
        self._saved: list[Blocks] = []
        self._filled: dict[str, Blocks] = {}

    def save(self, groups: Sequence[Sequence[int]]) -> None:
        """The blocks of a prefill are kept for a decode engine."""
        self._saved.append(_plain(groups))

    def fill(self, request: str, groups: Sequence[Sequence[int]]) -> None:
        """A load of `request` fills these blocks."""
        self._filled[request] = _plain(groups)

    def take(self) -> Copies | None:
        """All of it; None if there is nothing."""
        if not self._saved and not self._filled:
            return None
        taken = Copies(tuple(self._saved), self._filled)
        self._saved, self._filled = [], {}
        return taken


def _plain(groups: Sequence[Sequence[int]]) -> Blocks:
    # Block 0 is the one that vLLM never hands out.
    return tuple(tuple(int(block) for block in group if block) for group in groups)


@dataclass(frozen=True)
class _Views:
    """Caches that are copied together: those of a KV-cache group, whose block is so many rows in each."""

    group: int
    rows: int
    device: dict[str, torch.Tensor] = field(default_factory=dict)
    host: dict[str, torch.Tensor] = field(default_factory=dict)


class HostBuffer:
    """The worker's part: host memory of the caches' layout, and the copies. All calls come from the model runner's
    thread.

    Args:
        kv_caches: vLLM's tensors by layer name, as for `geometry.describe`.
        layers: From `geometry.transfer_layers`.
        num_blocks: In each cache.
        zeroed: Whether vLLM zeroes some new blocks, so that what a load leaves out of its blocks counts.
    """

    def __init__(
        self, kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Layer], num_blocks: int, zeroed: bool
    ) -> None:
        import torch

        self._zeroed = zeroed
        self._copy_blocks: CopyBlocks | None = None
        self._filling: dict[str, Blocks] = {}
        self.caches: dict[str, torch.Tensor] = _mirrored(kv_caches)
        """The host's tensors by layer name."""
        views: dict[tuple[int, int], _Views] = {}
        for name, layer in layers.items():
            # `geometry.describe` says what is wrong with one that is no tensor.
            if not isinstance(self.caches.get(name), torch.Tensor):
                continue
            rows = max(1, self.caches[name].shape[0] // num_blocks)
            found = views.setdefault((layer.group, rows), _Views(layer.group, rows))
            found.device[name], found.host[name] = kv_caches[name], self.caches[name]
        self._views = list(views.values())

    def set_copy_operation(self, copy_blocks: CopyBlocks) -> None:
        """vLLM's copy of blocks on this platform."""
        self._copy_blocks = copy_blocks

    def check(self) -> None:
        """Raises `RuntimeError` where vLLM has given no way to copy."""
        if self._copy_blocks is None:
            raise RuntimeError(
                "kv_buffer_device is cpu, but vLLM's model runner has not called set_host_xfer_buffer_ops: nothing "
                "copies blocks between the device and the host buffer"
            )

    def save_and_prepare(self, copies: Copies) -> None:
        """Copies to the host what the step lets peers read, and what is there of the blocks that its loads fill. To be
        called before the step goes to the library."""
        # A load may begin inside its first block, and a whole block comes back. What is zeroed stays so.
        kept = [groups if self._zeroed else tuple(group[:1] for group in groups) for groups in copies.filled.values()]
        self._copy([*copies.saved, *kept], "d2h")
        self._filling |= copies.filled

    def finish_loads(self, requests: Iterable[str], failed: Container[str]) -> None:
        """Copies to the device what loads have brought that have ended whole. To be called before vLLM is told."""
        ended = [(request, self._filling.pop(request, ())) for request in requests]
        self._copy([groups for request, groups in ended if request not in failed], "h2d")

    def _copy(self, requests: Sequence[Blocks], direction: str) -> None:
        """Copies the blocks of all these requests, with one call per KV-cache group."""
        for views in self._views:
            blocks = [block for groups in requests for block in groups[views.group : views.group + 1]]
            rows = [block * views.rows + row for ids in blocks for block in ids for row in range(views.rows)]
            if not rows:
                continue
            self.check()
            assert self._copy_blocks is not None
            source, target = (views.device, views.host) if direction == "d2h" else (views.host, views.device)
            with gpu_sync_allowed():
                self._copy_blocks(source, target, rows, rows, direction)


def _mirrored(kv_caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors in host memory that lie in their storages as the caches in theirs: those that share memory share it."""
    import torch

    storages: dict[int, torch.Tensor] = {}
    caches = {}
    for name, cache in kv_caches.items():
        if not isinstance(cache, torch.Tensor):
            # `geometry.describe` says what is wrong with it.
            caches[name] = cache
            continue
        storage = cache.untyped_storage()
        if (memory := storages.get(storage.data_ptr())) is None:
            memory = storages[storage.data_ptr()] = torch.zeros(storage.nbytes(), dtype=torch.uint8, device="cpu")
        view = torch.empty(0, dtype=cache.dtype, device="cpu")
        view.set_(memory.untyped_storage(), cache.storage_offset(), cache.shape, cache.stride())
        caches[name] = view
    return caches
