"""What the kernels are tried on: odd batches in blocks, and how far a result may be off."""

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.ops.batch import Batch, Span
from engine.ops.gpu.attention_tile import attend_oracle
from engine.ops.gpu.kv_format import (
    FP8,
    PLAIN,
    KvView,
    dequantise_oracle,
    quantise_oracle,
    quantised_region_bytes,
    view_quantised,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_WHOLE_GRID = os.environ.get("KVRELAY_KERNEL_GRID") == "1"

# The relative error of one rounding to a type.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

# (start, end) of each sequence's rows.
BATCHES: dict[str, list[tuple[int, int]]] = {
    "nothing": [],
    "decode 1": [(0, 1)],
    "decode 15": [(14, 15)],
    "decode 16": [(15, 16)],
    "decode 17": [(16, 17)],
    "decode 300": [(299, 300)],
    "decode 7": [(0, 1), (14, 15), (15, 16), (16, 17), (63, 64), (64, 65), (299, 300)],
    "chunk 15": [(0, 15)],
    "chunk 16": [(0, 16)],
    "chunk 17": [(0, 17)],
    "chunk 300": [(0, 300)],
    "chunk 16 at 1": [(1, 17)],
    "chunk 17 at 283": [(283, 300)],
    "chunks 7": [(0, 15), (0, 16), (16, 33), (3, 20), (0, 2), (283, 300), (7, 24)],
    "mixed 7": [(0, 17), (299, 300), (15, 16), (20, 37), (0, 1), (100, 115), (16, 17)],
}
SHARED = "mixed 7"
"""In this batch, sequences share their first block where it is full."""

T = TypeVar("T")
Limits = tuple[float, int | None, float | None]
"""Scale, window, soft cap."""


def sample(cases: Iterable[T], every: int) -> Sequence[T]:
    """All of them in ``make test-kernels``; else one in ``every``, spread by a fixed shuffle."""
    every_case = list(cases)
    if IS_WHOLE_GRID:
        return every_case
    random.Random(0).shuffle(every_case)
    return every_case[::every]


@dataclass(frozen=True)
class Shape:
    """Heads and blocks of a model."""

    head_dim: int
    group: int
    num_kv_heads: int = 2
    block_size: int = 16

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads


def make_batch(spans: list[tuple[int, int]], block_size: int, is_shared: bool = False) -> Batch:
    """Spans over shuffled blocks; shared ones hold the same first block."""
    counts = [-(-end // block_size) for _, end in spans]
    blocks = list(range(sum(counts) + 3))
    random.Random(len(blocks)).shuffle(blocks)
    first_row, made = 0, []
    for (start, end), count in zip(spans, counts, strict=True):
        table = np.array([blocks.pop() for _ in range(count)], dtype=np.int64)
        if is_shared and start >= block_size and made:
            owner = next((s for s in made if s.start >= block_size), None)
            table[0] = table[0] if owner is None else owner.block_table[0]
        made.append(Span(first_row, end - start, start, table))
        first_row += end - start
    empty = torch.zeros(first_row, dtype=torch.int64)
    return Batch(empty, empty, empty, tuple(made), empty[:0])


def num_blocks(batch: Batch) -> int:
    """Blocks of a layer that has room for the batch."""
    return max((int(span.block_table.max()) for span in batch.spans), default=0) + 2


def make_layer(batch: Batch, shape: Shape, dtype: torch.dtype, kv_format: int) -> KvView:
    """Random KV where a sequence has some; elsewhere what poisons a result that reads it."""
    count = num_blocks(batch)
    sizes = (count, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    is_written = torch.zeros(count, shape.block_size, dtype=torch.bool)
    for span in batch.spans:
        slots = torch.from_numpy(span.slots(np.arange(span.end), shape.block_size))
        is_written.view(-1)[slots] = True
    values = torch.randn(sizes)
    hidden = ~is_written[:, None, :, None].expand(sizes[:-1])
    if kv_format == PLAIN:
        return KvView(values.to(dtype).masked_fill_(hidden.unsqueeze(-1), torch.nan).to(DEVICE))
    region = quantised_region_bytes(shape.block_size, shape.num_kv_heads, shape.head_dim)
    memory = torch.zeros(count, region, dtype=torch.uint8, device=DEVICE)
    view = view_quantised(memory, kv_format, shape.block_size, shape.num_kv_heads, shape.head_dim)
    data, scales = quantise_oracle(values, kv_format)
    view.data.copy_(data)
    assert view.scales is not None
    view.scales.copy_(scales.masked_fill_(hidden, torch.nan))
    return view


def attention_bound(
    queries: Tensor, kv: KvView, block_table: Tensor, start: int, expected: Tensor, limits: Limits
) -> Tensor:
    """How far each element of one sequence's attention may be off, from what is rounded where.

    An answer is a mean of values by shares. Each share is rounded to the queries' type before it
    multiplies a value (with 8 bit KV once more, with the value's scale), so their part of the error
    is at most that ROUNDING of the same mean of absolute values; the answer is rounded once more.
    The rest happens in float32. A score is a sum of head_dim products, whose error goes into the
    exponent of its share; so does the soft cap's. The sums over columns are float32 too. Roundings
    of float32 add up like the steps of a walk: four times the root of their number.
    """
    rounding, fine = ROUNDING[queries.dtype], ROUNDING[torch.float32]
    magnitudes = KvView(kv.data.clone(), kv.scales)
    if kv.format == FP8:
        magnitudes.data[:, 1] &= 0x7F
    else:
        magnitudes.data[:, 1] = magnitudes.data[:, 1].abs()
    mean = attend_oracle(queries, magnitudes, block_table, start, *limits)
    keys = dequantise_oracle(KvView(kv.data[block_table], None if kv.scales is None else
                                    kv.scales[block_table]))[:, 0]  # fmt: skip
    head_dim = queries.shape[-1]
    most = float(queries.float().norm(dim=-1).max() * keys.nan_to_num().norm(dim=-1).max())
    most *= limits[0]
    exponent = 4 * fine * (head_dim**0.5 + 2) * most
    if limits[2] is not None:
        exponent += 8 * fine * limits[2]
    num_columns = start + len(queries)
    shares = 2 * exponent + 4 * fine * (num_columns**0.5 + 4)
    if queries.dtype != torch.float32:
        shares += rounding * (1 if kv.format == PLAIN else 2)
    return 1.01 * (shares * mean + rounding * expected.abs()) + 1e-7
