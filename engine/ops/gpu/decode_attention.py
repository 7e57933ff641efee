# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""Paged flash attention of single rows, each context cut into splits, and the splits' reduction.

https://crfm.stanford.edu/2023/10/12/flashdecoding.html. All query heads of one KV head are one
tile, so K and V are read once. How many splits there are is the host's choice; how long they are
is worked out on the device from each context, so that a CUDA graph serves every length. A row's
result depends on its own context and ``num_splits`` only, not on the rows beside it.

Knows nothing of batches. Called by ``ops``. Oracle: ``attention_tile.attend_oracle``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.gpu.attention_tile import attend_columns, load_rows
from engine.ops.gpu.configs import LEAST_SPLIT, REDUCE, TileConfig, head_pad, power_of_two
from engine.ops.gpu.kv_format import KvView


@triton.jit(do_not_specialize=["window"])
def decode_attention_kernel(
    output,  # *T [rows, heads, HEAD_DIM], contiguous; written where there is one split
    partial,  # *f32 [sequences, heads, splits, HEAD_DIM]; written where there are more
    partial_log,  # *f32 [sequences, heads, splits]: log2 of the sum of exponentials, likewise
    queries,  # *T [rows, heads, HEAD_DIM], rows query_stride apart
    blocks,  # *T | *i8 | *u8 [num_blocks, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    scales,  # *f16 [num_blocks, 2, BLOCK_SIZE, KV_HEADS]; not read where FORMAT is PLAIN
    block_tables,  # *i32 [sequences, table_stride]
    rows,  # *i32 [sequences]: each sequence's row of queries and output
    contexts,  # *i32 [sequences]: positions a row sees, its own included; 0: none, the answer is 0
    query_stride,  # i32
    block_stride,  # i64
    scale_stride,  # i64
    table_stride,  # i32
    scale,  # f32
    soft_cap,  # f32; any number where HAS_SOFT_CAP is false
    window,  # i32; any number where HAS_WINDOW is false
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
):
    """Grid (KV_HEADS, sequences, splits): one split of one sequence's heads of one KV head."""
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    table = block_tables + sequence.to(tl.int64) * table_stride
    row = tl.load(rows + sequence).to(tl.int64)
    context = tl.load(contexts + sequence)
    sees_from = 0
    if HAS_WINDOW:
        sees_from = tl.maximum(context - window, 0)
    begin = sees_from // BLOCK_N * BLOCK_N
    share = tl.maximum((context - begin + num_splits - 1) // num_splits, LEAST)
    split_length = (share + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    start = begin + split * split_length
    end = tl.minimum(start + split_length, context)

    g = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, HEAD_PAD)
    is_head = g < GROUP
    head = kv_head * GROUP + g
    q = load_rows(queries, row * query_stride + head * HEAD_DIM, is_head, HEAD_DIM, HEAD_PAD, True)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    all_from = tl.zeros([GROUP_PAD], tl.int32) + sees_from
    all_until = tl.zeros([GROUP_PAD], tl.int32) + context
    for first in range(start, end, BLOCK_N):
        acc, highest, total = attend_columns(
            q, acc, highest, total, first, end, all_from, all_until, table, blocks,
            block_stride, scales, scale_stride, kv_head, scale, soft_cap, BLOCK_N, BLOCK_SIZE,
            KV_HEADS, HEAD_DIM, HEAD_PAD, FORMAT, HAS_SOFT_CAP, MASKED=True,
        )  # fmt: skip

    is_empty = total == 0.0
    out = acc / tl.where(is_empty, 1.0, total)[:, None]
    is_element = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    if ONE_SPLIT:
        at = row * (KV_HEADS * GROUP * HEAD_DIM) + head * HEAD_DIM
        out = out.to(output.dtype.element_ty)
        tl.store(output + at[:, None] + dims[None, :], out, mask=is_element)
    else:
        at = (sequence.to(tl.int64) * (KV_HEADS * GROUP) + head) * num_splits + split
        log = tl.where(is_empty, float("-inf"), highest + tl.log2(tl.where(is_empty, 1.0, total)))
        tl.store(partial_log + at, log, mask=is_head)
        # What an empty split would say is never read.
        is_element &= start < end
        tl.store(partial + at[:, None] * HEAD_DIM + dims[None, :], out, mask=is_element)


@triton.jit
def reduce_splits_kernel(
    output,  # *T [rows, heads, HEAD_DIM], contiguous
    partial,  # *f32 [sequences, heads, splits, HEAD_DIM]; undefined where partial_log is -inf
    partial_log,  # *f32 [sequences, heads, splits]
    rows,  # *i32 [sequences]
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (heads, sequences): one head's splits become its row of output."""
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    at = sequence.to(tl.int64) * tl.num_programs(0) + head
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, HEAD_PAD)
    log = tl.load(partial_log + at * SPLITS + splits)
    highest = tl.max(log, 0)
    shares = tl.exp2(log - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(shares, 0)
    is_element = (log > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    pointers = partial + at * (SPLITS * HEAD_DIM) + splits[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(pointers, mask=is_element, other=0.0)
    out = tl.sum(parts * shares[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    row = tl.load(rows + sequence).to(tl.int64)
    to = output + (row * tl.num_programs(0) + head) * HEAD_DIM + dims
    tl.store(to, out.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


@dataclass(frozen=True, slots=True, eq=False)
class Partials:
    """Scratch between the two kernels; one serves all layers of a step."""

    values: Tensor
    """float32 ``[sequences, num_heads, num_splits, head_dim]``."""
    logs: Tensor
    """float32 ``[sequences, num_heads, num_splits]``."""

    @property
    def num_splits(self) -> int:
        return self.logs.shape[2]


def make_partials(
    num_sequences: int, num_heads: int, head_dim: int, num_splits: int, device: torch.device
) -> Partials:
    """Scratch for this many splits (a power of two); none is needed for one."""
    shape = (num_sequences if num_splits > 1 else 0, num_heads, num_splits)
    values = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
    return Partials(values, torch.empty(shape, dtype=torch.float32, device=device))


def decode_attention(
    queries: Tensor,
    kv: KvView,
    block_tables: Tensor,
    rows: Tensor,
    contexts: Tensor,
    partials: Partials,
    output: Tensor,
    config: TileConfig,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Attend one row of each sequence; other rows are left alone in ``output``.

    Args:
        queries: ``[rows, num_heads, head_dim]``; a row's heads are contiguous.
        block_tables: int32 ``[sequences, most blocks]``.
        rows, contexts: int32 ``[sequences]``, see the kernel.
        output: ``[rows, num_heads, head_dim]``, contiguous.
    """
    num_sequences = len(rows)
    if not num_sequences:
        return
    _, num_heads, head_dim = queries.shape
    _, _, block_size, num_kv_heads, _ = kv.data.shape
    group, num_splits = num_heads // num_kv_heads, partials.num_splits
    decode_attention_kernel[(num_kv_heads, num_sequences, num_splits)](
        output, partials.values, partials.logs, queries, kv.data, kv.scales_or_data,
        block_tables, rows, contexts,
        queries.stride(0), kv.data.stride(0), kv.scale_stride, block_tables.stride(0),
        scale, soft_cap or 0.0, window or 0,
        GROUP=group, GROUP_PAD=max(config.block_m, power_of_two(group)), KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, HEAD_PAD=head_pad(head_dim), BLOCK_SIZE=block_size,
        BLOCK_N=config.block_n, LEAST=LEAST_SPLIT, FORMAT=kv.format,
        HAS_SOFT_CAP=soft_cap is not None, HAS_WINDOW=window is not None,
        ONE_SPLIT=num_splits == 1,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        reduce_splits_kernel[(num_heads, num_sequences)](
            output, partials.values, partials.logs, rows,
            HEAD_DIM=head_dim, HEAD_PAD=head_pad(head_dim), SPLITS=num_splits,
            num_warps=REDUCE.num_warps, num_stages=REDUCE.num_stages,
        )  # fmt: skip
