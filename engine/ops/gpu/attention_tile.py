# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""The inner step of both attention kernels: some query rows meet one tile of columns.

Online softmax (https://arxiv.org/abs/2205.14135) in base 2, over K and V read from blocks through
a block table. Columns are positions of a sequence. Knows nothing of batches, chunks or splits.
Called by ``prefill_attention`` and ``decode_attention``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.gpu.kv_format import KvView, dequantise_oracle, load_elements

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(base, offsets, exists, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    """[n, HEAD_PAD] from rows at base + offsets [n]; zeros where there is none."""
    dims = tl.arange(0, HEAD_PAD)
    pointers = base + offsets[:, None] + dims[None, :]
    if MASKED and HEAD_DIM < HEAD_PAD:
        rows = tl.load(pointers, mask=exists[:, None] & (dims < HEAD_DIM)[None, :], other=0)
    elif MASKED:
        rows = tl.load(pointers, mask=exists[:, None], other=0)
    elif HEAD_DIM < HEAD_PAD:
        rows = tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def in_base_2(scores, scale, soft_cap, HAS_SOFT_CAP: tl.constexpr):
    """Products of queries and keys, f32 [m, n], as exponents of 2."""
    if HAS_SOFT_CAP:
        # tanh by its exponential: there is no tanh on every chip.
        power = tl.exp2(scores * (scale * 2.0 * LOG2E / soft_cap))
        scores = (soft_cap * LOG2E) * (1.0 - 2.0 / (power + 1.0))
    else:
        scores *= scale * LOG2E
    return scores


@triton.jit
def attend_columns(
    q,  # T [m, HEAD_PAD]
    acc,  # f32 [m, HEAD_PAD]: sum of shares times values, so far
    highest,  # f32 [m]: highest score so far
    total,  # f32 [m]: sum of shares so far
    first,  # i32, a multiple of BLOCK_N: the first column
    end,  # i32: no column from here on exists
    sees_from,  # i32 [m]: the first column each row sees
    sees_until,  # i32 [m]: the first column each row does not see any more
    table,  # *i32 [blocks of the sequence]
    blocks,  # *T | *i8 | *u8 [num_blocks, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    block_stride,  # i64: elements between blocks
    scales,  # *f16 [num_blocks, 2, BLOCK_SIZE, KV_HEADS]; not read where FORMAT is PLAIN
    scale_stride,  # i64: elements between blocks' scales
    kv_head,  # i32
    scale,  # f32
    soft_cap,  # f32
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """acc, highest and total with the columns first .. first + BLOCK_N - 1 in them.

    Without MASKED, every row must see all of them.
    """
    columns = first + tl.arange(0, BLOCK_N)
    exists = columns < end
    if BLOCK_N <= BLOCK_SIZE:
        # One block, and the table is as long as the columns that exist.
        block_ids = tl.load(table + first // BLOCK_SIZE).to(tl.int64) + tl.zeros_like(columns)
    elif MASKED:
        block_ids = tl.load(table + columns // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    else:
        block_ids = tl.load(table + columns // BLOCK_SIZE).to(tl.int64)
    heads = (columns % BLOCK_SIZE) * KV_HEADS + kv_head
    offsets = block_ids * block_stride + heads * HEAD_DIM
    values_at: tl.constexpr = BLOCK_SIZE * KV_HEADS * HEAD_DIM
    if FORMAT != 0:
        at = scales + block_ids * scale_stride + heads
        key_scales = tl.load(at, mask=exists, other=0.0).to(tl.float32)
        value_scales = tl.load(at + BLOCK_SIZE * KV_HEADS, mask=exists, other=0.0).to(tl.float32)

    k = load_rows(blocks, offsets, exists, HEAD_DIM, HEAD_PAD, MASKED)
    k = load_elements(k, FORMAT, q.dtype)
    # "ieee": float32 is never multiplied as tf32; 16 bit types are exact either way.
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if FORMAT != 0:
        scores *= key_scales[None, :]
    scores = in_base_2(scores, scale, soft_cap, HAS_SOFT_CAP)
    if MASKED:
        seen = (columns[None, :] >= sees_from[:, None]) & (columns[None, :] < sees_until[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    now_highest = tl.maximum(highest, tl.max(scores, 1))
    anchor = now_highest
    if MASKED:
        # A row that has seen nothing yet: -inf minus -inf is no number.
        anchor = tl.where(now_highest == float("-inf"), 0.0, now_highest)
    shares = tl.exp2(scores - anchor[:, None])
    fade = tl.exp2(highest - anchor)
    total = total * fade + tl.sum(shares, 1)
    if FORMAT != 0:
        shares *= value_scales[None, :]
    v = load_rows(blocks + values_at, offsets, exists, HEAD_DIM, HEAD_PAD, MASKED)
    v = load_elements(v, FORMAT, q.dtype)
    acc = tl.dot(shares.to(q.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, now_highest, total


def attend_oracle(
    queries: Tensor,
    kv: KvView,
    block_table: Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """One sequence's attention as its definition reads, in float32.

    Args:
        queries: ``[rows, num_heads, head_dim]`` of the positions ``start`` and on.
        block_table: block ids, at least to the last position.
        window: each row sees this many positions, itself included; None: all before it.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; None: as they are.

    Returns:
        float32, of the shape of ``queries``.
    """
    num_rows, num_heads, _ = queries.shape
    end = start + num_rows
    mine = block_table.long()
    scales = None if kv.scales is None else kv.scales[mine]
    blocks = dequantise_oracle(KvView(kv.data[mine], scales))
    group = num_heads // blocks.shape[3]
    keys, values = (
        blocks[:, i].flatten(0, 1)[:end].repeat_interleave(group, dim=1) for i in (0, 1)
    )
    scores = torch.einsum("mhd,nhd->hmn", queries.float(), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(start, end, device=queries.device).unsqueeze(1)
    column = torch.arange(end, device=queries.device)
    hidden = column > position
    if window is not None:
        hidden |= column <= position - window
    shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", shares, values)
