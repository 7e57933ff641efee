"""The fast path that torch alone gives on a CPU.

Attention gathers K and V of a sequence head by head (``[heads, tokens, head_dim]``, contiguous) and
runs as two batched matrix products around a softmax: in bfloat16 three times faster than
``scaled_dot_product_attention`` here, and no slower in float32. Query heads that share a KV head
are rows of the same product. Decode rows of about equal context go through one such product;
prefill chunks go 64 rows at a time, each tile seeing no more of the context than it may.

Knows nothing of models. Implements ``engine.ops.interface.Ops``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kv.cache import Layer, QuantizedLayer, key_rows
from engine.ops.batch import Batch, Span
from engine.ops.interface import Linear
from kvtransfer.layout import KvLayout

TILE_ROWS = 64
# A group of decode rows is padded to its longest context: at most this much gathered in vain.
MOST_PADDING = 1.25


class Scoring(NamedTuple):
    """What a layer does to scores."""

    scale: float
    soft_cap: float | None


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGroup:
    """Single rows of several sequences, attended at once."""

    rows: Tensor
    """[sequences]"""
    head_rows: Tensor
    """[sequences * num_kv_heads * width]: rows of the layer seen as [-1, head_dim]."""
    width: int
    """Longest context in the group."""
    positions: Tensor
    """[sequences * num_kv_heads, 1, 1]: of the rows."""
    mask: Tensor
    """[sequences * num_kv_heads, 1, width]: 0 or -inf, in the cache's dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Adjacent rows of one chunk."""

    first: int
    stop: int
    """Rows of the batch."""
    width: int
    """Context up to the last row, itself included."""
    positions: Tensor
    """[1, rows * heads per KV head, 1]: of the rows."""
    mask: Tensor
    """[1, rows * heads per KV head, width]: 0 or -inf, in the cache's dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A prefill chunk of one sequence."""

    head_rows: Tensor
    """[num_kv_heads * width]: rows of the layer seen as [-1, head_dim]."""
    width: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedAttention:
    """All a step's attention needs besides queries and KV."""

    decode_groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    windowed: dict[int, "PreparedAttention"] = field(default_factory=dict)
    """The same under windows, each made by the first layer that has it."""

    def within(self, window: int | None) -> "PreparedAttention":
        """The same for layers that see ``window`` positions."""
        if window is None:
            return self
        if window not in self.windowed:
            groups = tuple(_windowed(group, window) for group in self.decode_groups)
            chunks = tuple(
                replace(chunk, tiles=tuple(_windowed(tile, window) for tile in chunk.tiles))
                for chunk in self.chunks
            )
            self.windowed[window] = PreparedAttention(groups, chunks)
        return self.windowed[window]


class TorchCpuOps:
    """Implements ``engine.ops.interface.Ops``."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        bfloat16 = weight.dtype == torch.bfloat16
        if not torch.backends.mkldnn.is_available() or (
            bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        ):
            return lambda x: F.linear(x, weight, bias)
        # Blocked once for the matrix kernels: up to twice as fast as F.linear on every shape.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TILE_ROWS)
        product = torch.ops.mkldnn._linear_pointwise.default
        return lambda x: product(x, packed, bias, "none", [], "")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        wide = x.float()
        cos = torch.cat((cos, cos), dim=-1).unsqueeze(1)
        sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1)
        return torch.addcmul(wide * cos, wide.roll(half, -1), sin).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def prepare_attention(
        self, batch: Batch, layout: KvLayout, num_heads: int
    ) -> PreparedAttention:
        singles = [span for span in batch.spans if span.num_rows == 1]
        longer = [span for span in batch.spans if span.num_rows > 1]
        heads_per_kv = num_heads // layout.num_kv_heads
        return PreparedAttention(
            tuple(_decode_group(spans, layout) for spans in group_by_length(singles)),
            tuple(_chunk(span, layout, heads_per_kv) for span in longer),
        )

    def attention(
        self,
        queries: Tensor,
        layer: Layer,
        prepared: PreparedAttention,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        dtype = queries.dtype
        if isinstance(layer, QuantizedLayer):
            queries = queries.float()
        output = torch.empty_like(queries)
        scoring = Scoring(queries.shape[-1] ** -0.5 if scale is None else scale, soft_cap)
        seen = prepared.within(window)
        for group in seen.decode_groups:
            _attend_group(queries, layer, group, scoring, output)
        for chunk in seen.chunks:
            _attend_chunk(queries, layer, chunk, scoring, output)
        return output.flatten(1).to(dtype)


def group_by_length(spans: list[Span]) -> Iterator[list[Span]]:
    """Split single rows so that no group is padded by more than ``MOST_PADDING``."""
    group: list[Span] = []
    total = 0
    for span in sorted(spans, key=lambda span: -span.end):
        if group and group[0].end * (len(group) + 1) > MOST_PADDING * (total + span.end):
            yield group
            group, total = [], 0
        group.append(span)
        total += span.end
    if group:
        yield group


def _head_rows(spans: list[Span], width: int, layout: KvLayout) -> Tensor:
    """``[sequences * num_kv_heads * width]``. Padding repeats a sequence's own last token.

    So nothing foreign or unwritten is ever read, which a mask could not undo if it were NaN.
    """
    slots = np.stack(
        [s.slots(np.minimum(np.arange(width), s.end - 1), layout.block_size) for s in spans]
    )
    rows = key_rows(torch.from_numpy(slots), layout.block_size) * layout.num_kv_heads
    heads = torch.arange(layout.num_kv_heads).view(1, -1, 1)
    return (rows.unsqueeze(1) + heads).flatten()


def _mask(hidden: Tensor, layout: KvLayout) -> Tensor:
    dtype = torch.float32 if layout.dtype == "int8" else getattr(torch, layout.dtype)
    zeros = torch.zeros(hidden.shape, dtype=dtype)
    return zeros.masked_fill_(hidden, float("-inf"))


Masked = TypeVar("Masked", DecodeGroup, Tile)


def _windowed(part: Masked, window: int) -> Masked:
    """The same rows, seeing no more than ``window`` positions: what is before is masked, though
    still gathered."""
    before = torch.arange(part.width) <= part.positions - window
    return replace(part, mask=part.mask.masked_fill(before, float("-inf")))


def _decode_group(spans: list[Span], layout: KvLayout) -> DecodeGroup:
    width = max(span.end for span in spans)
    starts = torch.tensor([span.start for span in spans]).repeat_interleave(layout.num_kv_heads)
    positions = starts.view(-1, 1, 1)
    return DecodeGroup(
        rows=torch.tensor([span.first_row for span in spans]),
        head_rows=_head_rows(spans, width, layout),
        width=width,
        positions=positions,
        mask=_mask(torch.arange(width) > positions, layout),
    )


def _chunk(span: Span, layout: KvLayout, heads_per_kv: int) -> Chunk:
    tiles = []
    for first in range(0, span.num_rows, TILE_ROWS):
        stop = min(first + TILE_ROWS, span.num_rows)
        at = torch.arange(span.start + first, span.start + stop)
        positions = at.repeat_interleave(heads_per_kv).view(1, -1, 1)
        width = span.start + stop
        mask = _mask(torch.arange(width) > positions, layout)
        rows = (span.first_row + first, span.first_row + stop)
        tiles.append(Tile(*rows, width, positions, mask))
    return Chunk(_head_rows([span], span.end, layout), span.end, tuple(tiles))


def _gather(layer: Layer, head_rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """K and V as ``[sequences * num_kv_heads, width, head_dim]``; of int8 in float32."""
    if isinstance(layer, QuantizedLayer):
        _, num_rows, num_kv_heads, head_dim = layer.elements.shape
        rows, heads = head_rows // num_kv_heads, head_rows % num_kv_heads
        keys, values = layer.read(rows, heads), layer.read(rows + num_rows // 2, heads)
        return keys.view(-1, width, head_dim), values.view(-1, width, head_dim)
    _, _, block_size, num_kv_heads, head_dim = layer.shape
    flat = layer.view(-1, head_dim)
    keys = flat.index_select(0, head_rows)
    values = flat[block_size * num_kv_heads :].index_select(0, head_rows)
    return keys.view(-1, width, head_dim), values.view(-1, width, head_dim)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring
) -> Tensor:
    """``[n, q, head_dim] x [n, k, head_dim] -> [n, q, head_dim]``."""
    if scoring.soft_cap is None:
        scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scoring.scale)
    else:
        scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scoring.scale / scoring.soft_cap)
        scores = scores.tanh_().mul_(scoring.soft_cap).add_(mask)
    return torch.bmm(scores.softmax(-1), values)


def _attend_group(
    queries: Tensor, layer: Layer, group: DecodeGroup, scoring: Scoring, output: Tensor
) -> None:
    _, num_heads, head_dim = queries.shape
    keys, values = _gather(layer, group.head_rows, group.width)
    mine = queries.index_select(0, group.rows).view(keys.shape[0], -1, head_dim)
    attended = _attend(mine, keys, values, group.mask, scoring)
    output.index_copy_(0, group.rows, attended.view(-1, num_heads, head_dim))


def _attend_chunk(
    queries: Tensor, layer: Layer, chunk: Chunk, scoring: Scoring, output: Tensor
) -> None:
    _, num_heads, head_dim = queries.shape
    keys, values = _gather(layer, chunk.head_rows, chunk.width)
    num_kv_heads = keys.shape[0]
    for tile in chunk.tiles:
        shape = (tile.stop - tile.first, num_kv_heads, num_heads // num_kv_heads, head_dim)
        mine = queries[tile.first : tile.stop].view(shape).transpose(0, 1)
        attended = _attend(
            mine.reshape(num_kv_heads, -1, head_dim),
            keys[:, : tile.width],
            values[:, : tile.width],
            tile.mask,
            scoring,
        )
        by_row = attended.view(mine.shape).transpose(0, 1)
        output[tile.first : tile.stop].view(shape).copy_(by_row)
