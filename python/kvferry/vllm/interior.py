"""Describes what attention backends keep inside a block of the KV cache.

vLLM gives each layer a view with the logical axes (block, head, token, content), and its shape and strides say where
everything is, except what a backend keeps inside the content. There are four cases:

- Most backends keep K and then V of one token and head in the content: part `kv`. MLA keeps one latent per token, the
  same on every tensor-parallel rank: part `latent`. Tokens and heads can be told apart. `TOKENWISE` lists the backends
  whose source says so, in every release of `READ_RELEASES`.
- The CPU backend reinterprets (token, content) of a block and head as two halves, K of all tokens and then V of all
  tokens: parts `k` and `v`. With the instruction sets `vec` and `vec16`, K is kept as (content, token) and V as
  (token, content), for every dtype; `test_vllm_interior.py` measures that. So K of a token is as many runs of one
  element as the head has elements.
- With any other instruction set the CPU backend's halves are tiles (`amx`) or not known. Heads can be told apart,
  tokens cannot: a block's half moves whole.
- Of any other backend only the block as a whole is known: part `packed`. Some keep scales behind the data of all tokens
  or heads (the sparse-MLA indexer, NVFP4), which is nothing to cut.

Whole blocks move between equal block sizes only, and `packed` ones between equal numbers of shards. The library refuses
other pairs by name. A layer's `format` is what its map does not tell; both engines must share it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import vllm
from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec, SlidingWindowMLASpec

RELEASE = ".".join(vllm.__version__.split(".")[:2])
"""The installed vLLM's release."""

READ_RELEASES = frozenset({"0.32", "0.33"})
"""Releases in whose source, kernels included, the orders below were read and are the same for every backend listed. Any
other release is taken to keep them between equal releases only.

FP8 on CPU is one format in both: 0.32 rounds towards zero and 0.33 to nearest, but a byte stands for the same number.
"""

FORMAT_BYTES = 64
"""The longest format that a geometry takes."""

TOKENWISE = frozenset(
    {
        *("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN", "TRITON_ATTN_DIFFKV"),
        *("AITER_TRITON_MLA", "AMX_MLA", "CPU_MLA", "CUTLASS_MLA", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA"),
        *("ROCM_AITER_MLA", "TRITON_MLA"),
    }
)
"""Backends that keep all bytes of one token and head next to each other."""

CPU_TOKENWISE = frozenset({"CPU_ATTN/vec", "CPU_ATTN/vec16"})
"""Instruction sets of the CPU backend whose order inside a half is known. The two keep the same order."""


class LayoutError(ValueError):
    """A KV-cache tensor is not laid out in a way that this release understands."""


class View(NamedTuple):
    """A layer's tensor, in bytes.

    Attributes:
        pages: Kernel blocks per block.
        page: From one to the next.
        heads: Head slots.
        head: From one to the next.
        tokens: Tokens per kernel block.
        token: From one to the next.
        content: Per head slot and token.
        itemsize: Per element.
    """

    pages: int
    page: int
    heads: int
    head: int
    tokens: int
    token: int
    content: int
    itemsize: int

    @property
    def bytes(self) -> int:
        """Bytes of a kernel block, without gaps."""
        return self.heads * self.tokens * self.content

    @property
    def dense(self) -> bool:
        """Whether a kernel block is one run of bytes, whatever the order of heads and tokens."""
        return (self.heads - 1) * self.head + (self.tokens - 1) * self.token + self.content == self.bytes


class CachePart(NamedTuple):
    """A part of a layer, as the axes of a kvferry area.

    Attributes:
        name: Its name.
        offset: Its first byte in a block.
        heads: KV heads that can be told apart, None if they cannot.
        axes: The area's `head_stride`, `pages`, `page_stride`, `tokens`, `token_stride`, `units`, `unit_stride` and
            `content`.
        tokenwise: Whether tokens can be told apart.
    """

    name: str
    offset: int
    heads: int | None
    axes: dict[str, int]
    tokenwise: bool


def family(kernel: str) -> str:
    """Returns the backend that two engines must share: instruction sets with one order inside a block count as one."""
    return "CPU_ATTN" if kernel in CPU_TOKENWISE else kernel


def format_of(spec: Any, kernel: str, part: CachePart) -> str:
    """Names what the axes of a part do not tell of its bytes: equal on two engines whose bytes mean the same.

    The type of an element says it all where a token's bytes are K and V, or a latent, as plain numbers. In what moves
    whole, and where scales are kept beside the numbers, the order is the backend's own and may change with a release.
    """
    mode = KVQuantMode(spec.kv_quant_mode)
    stated = [str(spec.dtype).removeprefix("torch.")]
    name = getattr(spec, "cache_dtype_str", None) or "auto"
    if name != "auto":
        stated.append(name)
    elif mode != KVQuantMode.NONE:
        stated.append(mode.name.lower())
    plain = mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR) and not name.endswith("_mla")
    if not (plain and part.tokenwise and RELEASE in READ_RELEASES):
        stated.append(f"{family(kernel) or 'unknown'} of vLLM {RELEASE}")
    text = " ".join(stated)
    # A digest replaces the end of a name that is too long for the wire.
    if len(text.encode()) <= FORMAT_BYTES:
        return text
    return f"{text.encode()[:40].decode(errors='ignore')}~{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def parts(name: str, spec: Any, kernel: str, view: View) -> Iterator[CachePart]:
    """Yields the parts of layer `name`, which `kernel` (from `support.attention_kernels`) writes.

    Raises `LayoutError` that names the layer and what was expected.
    """
    if kernel.startswith("CPU_ATTN"):
        yield from _cpu(name, spec, kernel, view)
    elif spec.num_head_slots is not None and not (
        kernel == "FLASHINFER" and spec.num_head_slots == 2 * spec.num_kv_heads
    ):
        raise LayoutError(
            f"the attention backend {kernel or '(unknown)'} of {name} packs {spec.num_kv_heads} heads into "
            f"{spec.num_head_slots} slots, which this release does not understand; choose another with "
            "--attention-backend"
        )
    elif kernel in TOKENWISE and spec.num_head_slots is None:
        latent = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
        axes = _tokens(view, view.token, 1, 0, view.content)
        yield CachePart("latent" if latent else "kv", 0, spec.num_heads, axes, True)
    elif view.dense:
        yield CachePart("packed", 0, None, _whole(view, 0, view.bytes), False)
    else:
        raise LayoutError(
            f"the KV cache of {name} is not one run of bytes per block (strides {view.head} and {view.token} bytes, "
            f"{view.heads} heads of {view.tokens} tokens of {view.content} bytes), and how the attention backend "
            f"{kernel or '(unknown)'} orders it inside is not known"
        )


def _cpu(name: str, spec: Any, kernel: str, view: View) -> Iterator[CachePart]:
    if view.token != view.content or view.head != view.tokens * view.content or spec.head_size != spec.head_size_v:
        raise LayoutError(
            f"the KV cache of {name} is not contiguous inside a block (strides {view.head} and {view.token} bytes, "
            f"{view.tokens} tokens of {view.content} bytes, of which K has {spec.head_size} and V {spec.head_size_v} "
            "elements), which the CPU backend needs"
        )
    row, half = view.content // 2, view.tokens * view.content // 2
    if kernel in CPU_TOKENWISE:
        item = view.itemsize
        yield CachePart("k", 0, spec.num_heads, _tokens(view, item, row // item, view.tokens * item, item), True)
        yield CachePart("v", half, spec.num_heads, _tokens(view, row, 1, 0, row), True)
    else:
        yield CachePart("k", 0, spec.num_heads, _whole(view, view.head, half), False)
        yield CachePart("v", half, spec.num_heads, _whole(view, view.head, half), False)


def _tokens(view: View, token: int, units: int, unit: int, content: int) -> dict[str, int]:
    return {
        "head_stride": view.head,
        "pages": view.pages,
        "page_stride": view.page,
        "tokens": view.tokens,
        "token_stride": token,
        "units": units,
        "unit_stride": unit,
        "content": content,
    }


def _whole(view: View, head: int, content: int) -> dict[str, int]:
    # One token position; the kernel blocks of a block are runs of it.
    return {
        "head_stride": head,
        "pages": 1,
        "page_stride": 0,
        "tokens": 1,
        "token_stride": content,
        "units": view.pages,
        "unit_stride": view.page,
        "content": content,
    }
