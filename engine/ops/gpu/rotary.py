# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""Rotary positions of queries and keys, and K and V written to their blocks, in one launch.

Dimension i turns with i + head_dim / 2 (Hugging Face's order), https://arxiv.org/abs/2104.09864.
Into a quantised block, each token's head goes with a scale of its own.

Knows nothing of sequences: rows come with their angles and their place. Called by ``ops``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.gpu.configs import ROTARY, power_of_two
from engine.ops.gpu.kv_format import (
    PLAIN,
    KvView,
    quantise_oracle,
    scale_of,
    store_elements,
)


@triton.jit
def rotary_kernel(
    rotated,  # *T [rows, QUERY_HEADS, 2 * HALF], contiguous
    blocks,  # *T | *i8 | *u8 [num_blocks, 2, BLOCK_SIZE, KV_HEADS, 2 * HALF]; where KV_HEADS > 0
    scales,  # *f16 [num_blocks, 2, BLOCK_SIZE, KV_HEADS]; where FORMAT is not PLAIN
    heads,  # *T [rows, QUERY_HEADS + 2 * KV_HEADS, 2 * HALF], rows head_stride apart: q, k, v
    cosines,  # *f32 [rows, HALF], contiguous
    sines,  # *f32 [rows, HALF], contiguous
    key_rows,  # *i64 [rows]: block_id * 2 * BLOCK_SIZE + offset, where KV_HEADS > 0
    head_stride,  # i64
    block_stride,  # i64
    scale_stride,  # i64
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (rows, ceil(heads / BLOCK_HEADS)): some heads of one row, in float32."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, HALF_PAD)
    is_pair = pair < HALF
    exists = (head < QUERY_HEADS + 2 * KV_HEADS)[:, None] & is_pair[None, :]
    at = heads + row * head_stride + head[:, None] * (2 * HALF) + pair[None, :]
    first = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=exists, other=0.0).to(tl.float32)
    cos = tl.load(cosines + row * HALF + pair, mask=is_pair, other=0.0)[None, :]
    sin = tl.load(sines + row * HALF + pair, mask=is_pair, other=0.0)[None, :]
    # Values do not turn.
    turns = (head < QUERY_HEADS + KV_HEADS)[:, None]
    turned_first = tl.where(turns, first * cos - second * sin, first)
    turned_second = tl.where(turns, second * cos + first * sin, second)

    is_query = exists & (head < QUERY_HEADS)[:, None]
    to = rotated + row * (QUERY_HEADS * 2 * HALF) + head[:, None] * (2 * HALF) + pair[None, :]
    tl.store(to, turned_first.to(rotated.dtype.element_ty), mask=is_query)
    tl.store(to + HALF, turned_second.to(rotated.dtype.element_ty), mask=is_query)

    if KV_HEADS > 0:
        key_row = tl.load(key_rows + row)
        block_id = key_row // (2 * BLOCK_SIZE)
        is_kv = (head >= QUERY_HEADS) & (head < QUERY_HEADS + 2 * KV_HEADS)
        is_value = head >= QUERY_HEADS + KV_HEADS
        kv_head = tl.where(is_value, head - KV_HEADS, head) - QUERY_HEADS
        slot = key_row % (2 * BLOCK_SIZE) + tl.where(is_value, BLOCK_SIZE, 0)
        place = slot * KV_HEADS + kv_head
        to = blocks + block_id * block_stride + place[:, None] * (2 * HALF) + pair[None, :]
        is_stored = exists & is_kv[:, None]
        if FORMAT == 0:
            tl.store(to, turned_first.to(blocks.dtype.element_ty), mask=is_stored)
            tl.store(to + HALF, turned_second.to(blocks.dtype.element_ty), mask=is_stored)
        else:
            # What 8 bits stand for is what the 16 bit cache would hold.
            turned_first = turned_first.to(rotated.dtype.element_ty).to(tl.float32)
            turned_second = turned_second.to(rotated.dtype.element_ty).to(tl.float32)
            largest = tl.maximum(tl.abs(turned_first), tl.abs(turned_second))
            scale = scale_of(largest, FORMAT)
            tl.store(scales + block_id * scale_stride + place, scale, mask=is_kv)
            tl.store(to, store_elements(turned_first, scale, FORMAT), mask=is_stored)
            tl.store(to + HALF, store_elements(turned_second, scale, FORMAT), mask=is_stored)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``[rows, heads, head_dim]`` turned by float32 ``[rows, head_dim / 2]`` angles."""
    return _launch(x, cos, sin, None, None)


def rotate_and_store(
    heads: Tensor, cos: Tensor, sin: Tensor, kv: KvView, key_rows: Tensor
) -> Tensor:
    """Turn q and k; k and v go to their blocks.

    Args:
        heads: ``[rows, num_heads + 2 * num_kv_heads, head_dim]``: q, k, v; rows may be apart.
        cos, sin: float32 ``[rows, head_dim / 2]``.
        key_rows: int64 ``[rows]``, see ``engine.kv.cache``; rows nobody wants point into a block
            that nobody reads.

    Returns:
        The queries, ``[rows, num_heads, head_dim]``.
    """
    return _launch(heads, cos, sin, kv, key_rows)


def _launch(
    heads: Tensor, cos: Tensor, sin: Tensor, kv: KvView | None, key_rows: Tensor | None
) -> Tensor:
    num_rows, num_heads, head_dim = heads.shape
    num_kv_heads = 0 if kv is None else kv.data.shape[3]
    num_query_heads = num_heads - 2 * num_kv_heads
    rotated = heads.new_empty((num_rows, num_query_heads, head_dim))
    if not num_rows:
        return rotated
    # Without KV nothing is read or written there: any tensor stands in.
    view = KvView(rotated) if kv is None else kv
    rotary_kernel[(num_rows, triton.cdiv(num_heads, ROTARY.block_m))](
        rotated, view.data, view.scales_or_data, heads, cos, sin,
        cos if key_rows is None else key_rows,
        heads.stride(0), view.data.stride(0), view.scale_stride,
        QUERY_HEADS=num_query_heads, KV_HEADS=num_kv_heads,
        HALF=head_dim // 2, HALF_PAD=power_of_two(head_dim // 2),
        BLOCK_SIZE=1 if kv is None else kv.data.shape[2], BLOCK_HEADS=ROTARY.block_m,
        FORMAT=view.format,
        num_warps=ROTARY.num_warps, num_stages=ROTARY.num_stages,
    )  # fmt: skip
    return rotated


def rotate_oracle(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``rotate`` as its definition reads."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def store_oracle(keys: Tensor, values: Tensor, kv: KvView, key_rows: Tensor) -> None:
    """Write ``[rows, num_kv_heads, head_dim]`` to their places, in the view's format."""
    block_size = kv.data.shape[2]
    block_ids, offsets = key_rows // (2 * block_size), key_rows % (2 * block_size)
    for i, stored in enumerate((keys, values)):
        if kv.format == PLAIN:
            kv.data[block_ids, i, offsets] = stored.to(kv.data.dtype)
            continue
        assert kv.scales is not None
        data, scales = quantise_oracle(stored, kv.format)
        kv.data[block_ids, i, offsets], kv.scales[block_ids, i, offsets] = data, scales
