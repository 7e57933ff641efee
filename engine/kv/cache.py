"""The KV memory of an engine: a tensor a layer, ``[num_blocks, 2, block_size, heads, head_dim]``.

Rows are addressed without copies: seen as ``[num_blocks * 2 * block_size, heads, head_dim]``, the
key of a token is at ``key_rows(slot)`` and its value ``block_size`` rows further.

Knows nothing of who owns which block. Written and read by the models on the step thread; bytes of
whole blocks are read and written by kvtransfer, from other threads, through ``region``.
"""

import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from engine.errors import CapacityError, ModelError
from engine.kv.manager import BlockCopy
from kvtransfer.layout import KvLayout


def num_blocks_for(num_bytes: int, layout: KvLayout) -> int:
    """Blocks (all layers of them) that fit into ``num_bytes``."""
    return num_bytes // layout.block_bytes


def key_rows(slots: Tensor, block_size: int) -> Tensor:
    """Row of each slot's key; the value's row is ``block_size`` further. Shapes as ``slots``."""
    return slots + slots // block_size * block_size


class PagedKvCache:
    """Zeroed block memory, made once and never moved.

    Raises:
        CapacityError: not even one block.
        ModelError: a device this build cannot keep KV on.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: str = "cpu") -> None:
        if num_blocks < 1:
            raise CapacityError(
                f"KV cache: no room for one block of {layout.block_bytes} bytes; "
                "raise --kv-cache-bytes"
            )
        if device != "cpu":
            raise ModelError(f"KV cache: device {device} is not supported; use --device cpu")
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (num_blocks, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        memory = [_zeroed(num_blocks * layout.region_bytes) for _ in range(layout.num_layers)]
        dtype = getattr(torch, layout.dtype)
        self._bytes = [memoryview(buffer) for buffer in memory]
        self.layers = tuple(torch.frombuffer(b, dtype=dtype).view(shape) for b in memory)

    def region(self, layer: int, block_id: int, num_blocks: int = 1) -> memoryview:
        """The writable bytes of adjacent blocks of one layer: ``num_blocks * region_bytes``.

        Raises:
            IndexError: outside the cache.
        """
        if block_id < 0 or not 1 <= num_blocks <= self.num_blocks - block_id:
            raise IndexError(f"blocks {block_id}..{block_id + num_blocks - 1} of {self.num_blocks}")
        size = self.layout.region_bytes
        return self._bytes[layer][block_id * size : (block_id + num_blocks) * size]

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """All layers of whole blocks, one copy after the other."""
        for copy in copies:
            for layer in range(self.layout.num_layers):
                self.region(layer, copy.to_block)[:] = self.region(layer, copy.from_block)

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store K and V of tokens.

        Args:
            rows: ``[tokens]``, from ``key_rows``.
            keys, values: ``[tokens, num_kv_heads, head_dim]`` in the cache's dtype.
        """
        flat = self.layers[layer].flatten(0, 2)
        flat.index_copy_(0, rows, keys)
        flat[self.layout.block_size :].index_copy_(0, rows, values)


def _zeroed(num_bytes: int) -> mmap.mmap:
    """Private zero pages: resident only once written; huge where the kernel has them."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(
            f"KV cache: the machine has no {num_bytes} bytes for a layer; lower --kv-cache-bytes"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
