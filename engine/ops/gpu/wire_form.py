# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""Between blocks and the canonical wire form of tokens, in either direction, in any formats.

The wire form is what instances of unequal KV layouts exchange: ``[tokens, 2, heads, head_dim]`` in
a float type, or 8 bits with float16 scales ``[tokens, 2, heads]``. A block of one token is exactly
that, so both sides of a move are a ``KvView`` and a slot for each token: block size, dtype and
format may all differ. Equal formats move bit for bit.

Knows nothing of handoffs. Called by ``ops``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.gpu.configs import WIRE_FORM, head_pad
from engine.ops.gpu.kv_format import (
    PLAIN,
    KvView,
    dequantise_oracle,
    load_elements,
    quantise_oracle,
    scale_of,
    store_elements,
)


@triton.jit
def move_tokens_kernel(
    target,  # *T | *i8 | *u8 [blocks, 2, TARGET_SIZE, HEADS, HEAD_DIM]
    target_scales,  # *f16 [blocks, 2, TARGET_SIZE, HEADS]; where TARGET is not PLAIN
    source,  # *T | *i8 | *u8 [blocks, 2, SOURCE_SIZE, HEADS, HEAD_DIM]
    source_scales,  # *f16 [blocks, 2, SOURCE_SIZE, HEADS]; where SOURCE is not PLAIN
    target_slots,  # *i64 [tokens]: block_id * TARGET_SIZE + offset
    source_slots,  # *i64 [tokens]: block_id * SOURCE_SIZE + offset
    target_stride,  # i64: elements between blocks
    target_scale_stride,  # i64
    source_stride,  # i64
    source_scale_stride,  # i64
    TARGET_SIZE: tl.constexpr,
    SOURCE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    TARGET: tl.constexpr,
    SOURCE: tl.constexpr,
):
    """Grid (tokens, ceil(2 * HEADS / BLOCK_HEADS)): some heads' K and V of one token."""
    token = tl.program_id(0)
    part = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, HEAD_PAD)
    is_head = part < 2 * HEADS
    exists = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    kv = part // HEADS
    head = part % HEADS

    slot = tl.load(source_slots + token)
    place = (kv * SOURCE_SIZE + slot % SOURCE_SIZE) * HEADS + head
    block = slot // SOURCE_SIZE
    at = block * source_stride + place[:, None] * HEAD_DIM + dims[None, :]
    elements = tl.load(source + at, mask=exists, other=0)
    at_scale = source_scales + block * source_scale_stride + place

    slot = tl.load(target_slots + token)
    place = (kv * TARGET_SIZE + slot % TARGET_SIZE) * HEADS + head
    block = slot // TARGET_SIZE
    to = target + block * target_stride + place[:, None] * HEAD_DIM + dims[None, :]
    to_scale = target_scales + block * target_scale_stride + place

    if SOURCE == TARGET:
        if SOURCE != 0:
            tl.store(to_scale, tl.load(at_scale, mask=is_head, other=0.0), mask=is_head)
        tl.store(to, elements.to(target.dtype.element_ty), mask=exists)
    else:
        values = load_elements(elements, SOURCE, tl.float32)
        if SOURCE != 0:
            values *= tl.load(at_scale, mask=is_head, other=0.0).to(tl.float32)[:, None]
        if TARGET == 0:
            tl.store(to, values.to(target.dtype.element_ty), mask=exists)
        else:
            scale = scale_of(tl.abs(values), TARGET)
            tl.store(to_scale, scale, mask=is_head)
            tl.store(to, store_elements(values, scale, TARGET), mask=exists)


@dataclass(frozen=True, slots=True, eq=False)
class WireForm:
    """Some tokens' K and V of one layer, on their way."""

    data: Tensor
    """``[tokens, 2, heads, head_dim]``, contiguous; int8 for INT8, uint8 for FP8."""
    scales: Tensor | None = None
    """float16 ``[tokens, 2, heads]``, contiguous."""

    @property
    def as_blocks(self) -> KvView:
        """The same memory as blocks of one token."""
        scales = None if self.scales is None else self.scales.unsqueeze(2)
        return KvView(self.data.unsqueeze(2), scales)


def pack(kv: KvView, slots: Tensor, wire: WireForm) -> None:
    """Blocks to wire form: token i is at ``slots[i]`` (int64, on the device)."""
    _move(kv, slots, wire.as_blocks, torch.arange(len(slots), device=slots.device))


def unpack(wire: WireForm, kv: KvView, slots: Tensor) -> None:
    """Wire form to blocks: token i goes to ``slots[i]`` (int64, on the device)."""
    _move(wire.as_blocks, torch.arange(len(slots), device=slots.device), kv, slots)


def _move(source: KvView, source_slots: Tensor, target: KvView, target_slots: Tensor) -> None:
    if not len(source_slots):
        return
    _, _, source_size, num_heads, head_dim = source.data.shape
    move_tokens_kernel[(len(source_slots), triton.cdiv(2 * num_heads, WIRE_FORM.block_m))](
        target.data, target.scales_or_data, source.data, source.scales_or_data,
        target_slots, source_slots,
        target.data.stride(0), target.scale_stride, source.data.stride(0), source.scale_stride,
        TARGET_SIZE=target.data.shape[2], SOURCE_SIZE=source_size, HEADS=num_heads,
        HEAD_DIM=head_dim, HEAD_PAD=head_pad(head_dim), BLOCK_HEADS=WIRE_FORM.block_m,
        TARGET=target.format, SOURCE=source.format,
        num_warps=WIRE_FORM.num_warps, num_stages=WIRE_FORM.num_stages,
    )  # fmt: skip


def move_oracle(source: KvView, source_slots: Tensor, target: KvView, target_slots: Tensor) -> None:
    """What pack and unpack do, by indexing."""
    source_size, target_size = source.data.shape[2], target.data.shape[2]
    at = (source_slots // source_size, slice(None), source_slots % source_size)
    to = (target_slots // target_size, slice(None), target_slots % target_size)
    if source.format == target.format:
        target.data[to] = source.data[at].to(target.data.dtype)
        if source.scales is not None and target.scales is not None:
            target.scales[to] = source.scales[at]
        return
    scales = None if source.scales is None else source.scales[at]
    values = dequantise_oracle(KvView(source.data[at], scales))
    if target.format == PLAIN:
        target.data[to] = values.to(target.data.dtype)
        return
    assert target.scales is not None
    target.data[to], target.scales[to] = quantise_oracle(values, target.format)
