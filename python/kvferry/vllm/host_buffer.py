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

from . import host_memory

if TYPE_CHECKING:
    import torch

    from .geometry import Layer

CopyBlocks = Callable[[dict[str, Any], dict[str, Any], list[int], list[int], str], None]
"""vLLM's `CopyBlocksOp`: takes caches to copy from and to, block ids in either, and `d2h` or `h2d`. A copy comes after
all that is enqueued on the current stream; `d2h` is complete when it returns, `h2d` comes before later work on the
stream."""

_PIECE = 2**30
"""Bytes of host memory that are taken between two checks of how much is left."""

Blocks = tuple[tuple[int, ...], ...]
"""Block ids by transferred KV-cache group."""


@dataclass(frozen=True)
class Copies:
    """The blocks that a step has to copy.

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
        """Adds the blocks of a prefill that are kept for a decode engine."""
        self._saved.append(_plain(groups))

    def fill(self, request: str, groups: Sequence[Sequence[int]]) -> None:
        """Adds blocks that a load of `request` fills."""
        self._filled[request] = _plain(groups)

    def take(self) -> Copies | None:
        """Takes the collected copies; None if there are none."""
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

    Raises `MemoryError` where the host has not as much memory.
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
        """Takes vLLM's copy of blocks on this platform."""
        self._copy_blocks = copy_blocks

    def check(self) -> None:
        """Raises `RuntimeError` if vLLM has given no copy operation."""
        if self._copy_blocks is None:
            raise RuntimeError(
                "kv_buffer_device is cpu, but vLLM's model runner has not called set_host_xfer_buffer_ops: nothing "
                "copies blocks between the device and the host buffer"
            )

    def save_and_prepare(self, copies: Copies) -> None:
        """Copies to the host the blocks that the step lets peers read, and the parts that its loads do not fill of
        theirs. To be called before the step goes to the library."""
        # A load may begin inside its first block, and a whole block comes back. What is zeroed stays so.
        kept = [groups if self._zeroed else tuple(group[:1] for group in groups) for groups in copies.filled.values()]
        self._copy([*copies.saved, *kept], "d2h")
        self._filling |= copies.filled

    def finish_loads(self, requests: Iterable[str], failed: Container[str]) -> None:
        """Copies the blocks of complete loads to the device. To be called before vLLM is told of the loads."""
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

    theirs = [cache.untyped_storage() for cache in kv_caches.values() if isinstance(cache, torch.Tensor)]
    storages = _taken({storage.data_ptr(): storage.nbytes() for storage in theirs})
    caches = {}
    for name, cache in kv_caches.items():
        if not isinstance(cache, torch.Tensor):
            # `geometry.describe` says what is wrong with it.
            caches[name] = cache
            continue
        memory = storages[cache.untyped_storage().data_ptr()]
        view = torch.empty(0, dtype=cache.dtype, device="cpu")
        view.set_(memory.untyped_storage(), cache.storage_offset(), cache.shape, cache.stride())
        caches[name] = view
    return caches


def _taken(sizes: Mapping[int, int]) -> dict[int, torch.Tensor]:
    """Host memory of these sizes in bytes, zeroed and so really there: Linux gives pages out when they are written
    first, and ends a process for one that it has not.

    Raises `MemoryError` before that where the host has not enough left. Ranks that start at the same time take their
    parts side by side, so it looks again for every piece."""
    import torch

    total = left = sum(sizes.values())
    storages = {}
    for key, size in sizes.items():
        memory = storages[key] = torch.empty(size, dtype=torch.uint8, device="cpu")
        for start in range(0, size, _PIECE):
            _check_room(left, total)
            memory[start : start + _PIECE].zero_()
            left -= min(_PIECE, size - start)
    return storages


def _check_room(left: int, total: int) -> None:
    room = host_memory.available()
    if room is None or room.nbytes >= left:
        return
    raise MemoryError(
        f"kv_buffer_device is cpu, for which this rank needs host memory as large as its KV cache: {_gib(total)}. It "
        f"has {_gib(total - left)} of that, and {_gib(room.nbytes)} are left of {room.of} memory. Make the KV cache "
        "smaller (--kv-cache-memory-bytes or --gpu-memory-utilization), give the host or the container more memory "
        "(for every rank), or leave out kv_buffer_device"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / host_memory.GIB:.2f} GiB"
