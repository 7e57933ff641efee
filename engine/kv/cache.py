"""The KV memory of an engine: a tensor a layer, ``[num_blocks, 2, block_size, heads, head_dim]``.

In int8 a layer is such a tensor and its scales, side by side in every block (``QuantizedLayer``).

Rows are addressed without copies: seen as ``[num_blocks * 2 * block_size, heads, head_dim]``, the
key of a token is at ``key_rows(slot)`` and its value ``block_size`` rows further.

Knows nothing of who owns which block. Written and read by the models on the step thread; bytes of
whole blocks are read and written by kvtransfer, from other threads, through ``region``.
"""

import mmap
from collections.abc import Iterable
from dataclasses import dataclass

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
        self._bytes = [memoryview(buffer) for buffer in memory]
        self.layers: tuple[Layer, ...]
        if layout.dtype == "int8":
            self.layers = tuple(_quantized(buffer, num_blocks, layout) for buffer in memory)
        else:
            dtype = getattr(torch, layout.dtype)
            self.layers = tuple(torch.frombuffer(b, dtype=dtype).view(shape) for b in memory)

    def address(self, layer: int) -> int:
        """Of the first byte of a layer."""
        whole = self.layers[layer]
        return (whole.elements if isinstance(whole, QuantizedLayer) else whole).data_ptr()

    def fill(self, byte: int) -> None:
        """Every byte of it: what was never written then has a value that is known."""
        for layer in self._bytes:
            layer[:] = bytes([byte]) * layer.nbytes

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
            keys, values: ``[tokens, num_kv_heads, head_dim]`` in the cache's dtype; any that
                floats have where that is int8.
        """
        whole = self.layers[layer]
        if isinstance(whole, QuantizedLayer):
            whole.write(rows, keys)
            whole.write(rows + self.layout.block_size, values)
            return
        flat = whole.flatten(0, 2)
        flat.index_copy_(0, rows, keys)
        flat[self.layout.block_size :].index_copy_(0, rows, values)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLayer:
    """KV in int8 with a scale for every token's key, and value, of every head."""

    elements: Tensor
    """int8 ``[num_blocks, 2 * block_size, heads, head_dim]``; blocks are a region apart."""
    scales: Tensor
    """float16 ``[num_blocks, 2 * block_size, heads]``; likewise."""

    def write(self, rows: Tensor, x: Tensor) -> None:
        """q = round(x / scale), scale = max|x| / 127 in float16. ``x``: [tokens, heads, dim]."""
        block, row = rows // self.scales.shape[1], rows % self.scales.shape[1]
        wide = x.float()
        scales = (wide.abs().amax(-1) / 127).clamp(max=torch.finfo(torch.float16).max).half()
        # A token of zeros has scale 0, and any inverse does.
        inverse = scales.float().clamp(min=torch.finfo(torch.float16).smallest_normal / 1024)
        self.elements[block, row] = (wide / inverse[..., None]).round().clamp(-127, 127).char()
        self.scales[block, row] = scales

    def read(self, rows: Tensor, heads: Tensor) -> Tensor:
        """float32 ``[n, head_dim]`` of row i of ``rows`` and head i of ``heads``."""
        block, row = rows // self.scales.shape[1], rows % self.scales.shape[1]
        scales = self.scales[block, row, heads].float()
        return self.elements[block, row, heads].float() * scales[:, None]

    def dequantized(self, blocks: Tensor) -> Tensor:
        """float32 ``[blocks, 2, block_size, heads, head_dim]``."""
        wide = self.elements[blocks].float() * self.scales[blocks].float()[..., None]
        return wide.unflatten(1, (2, -1))


Layer = Tensor | QuantizedLayer


def _quantized(memory: mmap.mmap, num_blocks: int, layout: KvLayout) -> QuantizedLayer:
    num_rows, heads = 2 * layout.block_size, layout.num_kv_heads
    num_elements = num_rows * heads * layout.head_dim
    regions = torch.frombuffer(memory, dtype=torch.int8).view(num_blocks, layout.region_bytes)
    elements, scales = regions[:, :num_elements], regions[:, num_elements:]
    return QuantizedLayer(
        elements.unflatten(1, (num_rows, heads, layout.head_dim)),
        scales.view(torch.float16).unflatten(1, (num_rows, heads)),
    )


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
