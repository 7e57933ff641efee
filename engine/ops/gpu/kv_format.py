# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""How K and V are stored in a block: as they are, or in 8 bits with a scale a token and head.

A quantised block is its data ``[2, block_size, num_kv_heads, head_dim]`` followed by float16 scales
``[2, block_size, num_kv_heads]``; a value is its 8 bits times its scale. int8 is symmetric, -127
to 127. fp8 is e4m3 (https://arxiv.org/abs/2209.05433), kept as bytes and converted by shifts: every
chip can do it, also those without fp8 of their own or with another kind.

Knows nothing of attention or sequences. Called by every kernel that touches blocks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PLAIN, INT8, FP8 = 0, 1, 2
MOST = {INT8: 127.0, FP8: 448.0}
"""The largest magnitude that 8 bits hold."""

# The same numbers, as kernels must see them.
_PLAIN, _INT8 = tl.constexpr(PLAIN), tl.constexpr(INT8)
_MOST_INT8, _MOST_FP8 = tl.constexpr(MOST[INT8]), tl.constexpr(MOST[FP8])


@dataclass(frozen=True, slots=True, eq=False)
class KvView:
    """One layer's KV (or the wire form of some tokens), with its scales if it is quantised."""

    data: Tensor
    """``[num_blocks, 2, block_size, num_kv_heads, head_dim]``; int8 for INT8, uint8 for FP8.
    A region is contiguous, regions may be apart."""
    scales: Tensor | None = None
    """float16 ``[num_blocks, 2, block_size, num_kv_heads]``; None for PLAIN."""

    @property
    def format(self) -> int:
        if self.scales is None:
            return PLAIN
        return INT8 if self.data.dtype == torch.int8 else FP8

    @property
    def scales_or_data(self) -> Tensor:
        """What a kernel is given as scales: it never reads them in a PLAIN view."""
        return self.data if self.scales is None else self.scales

    @property
    def scale_stride(self) -> int:
        """From a block's scales to the next block's, in elements."""
        return 0 if self.scales is None else self.scales.stride(0)


def quantised_region_bytes(block_size: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of one (layer, block): data, then scales."""
    return 2 * block_size * num_kv_heads * (head_dim + 2)


def view_quantised(
    memory: Tensor, kv_format: int, block_size: int, num_kv_heads: int, head_dim: int
) -> KvView:
    """See uint8 ``[num_blocks, quantised_region_bytes]`` as data and scales, without a copy."""
    num_blocks, region_bytes = memory.shape
    data_shape = (num_blocks, 2, block_size, num_kv_heads, head_dim)
    data_bytes = 2 * block_size * num_kv_heads * head_dim
    data = memory[:, :data_bytes].view(torch.int8 if kv_format == INT8 else torch.uint8)
    scales = memory.view(torch.float16)[:, data_bytes // 2 : region_bytes // 2]
    return KvView(data.unflatten(1, data_shape[1:]), scales.unflatten(1, data_shape[1:4]))


@triton.jit
def load_elements(stored, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Stored elements as DTYPE, before their scale: exact in every float type here."""
    if FORMAT == _PLAIN:
        elements = stored.to(DTYPE)
    elif FORMAT == _INT8:
        elements = stored.to(tl.float32).to(DTYPE)
    else:
        bits = stored.to(tl.uint16)
        # e4m3's fields in place of float16's: sign, exponent and mantissa fit, the bias is 8 less.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        elements = (half * 256.0).to(DTYPE)
    return elements


@triton.jit
def scale_of(values, FORMAT: tl.constexpr):
    """values: f32 [n, d] of n token-heads -> their scales, f16 [n]."""
    most: tl.constexpr = _MOST_INT8 if FORMAT == _INT8 else _MOST_FP8
    return (tl.max(tl.abs(values), axis=1) / most).to(tl.float16)


@triton.jit
def store_elements(values, scales, FORMAT: tl.constexpr):
    """values: f32 [n, d], scales: f16 [n] -> int8 (INT8) or uint8 (FP8) [n, d]."""
    wide = scales.to(tl.float32)
    # A head of zeros has scale zero.
    inverse = tl.where(wide > 0.0, 1.0 / tl.where(wide > 0.0, wide, 1.0), 0.0)
    scaled = values * inverse[:, None]
    # A scale is rounded to float16, and may be a little too small for the largest value.
    if FORMAT == _INT8:
        clamped = tl.minimum(tl.maximum(scaled, -_MOST_INT8), _MOST_INT8)
        stored = tl.floor(clamped + 0.5).to(tl.int8)
    else:
        clamped = tl.minimum(tl.maximum(scaled, -_MOST_FP8), _MOST_FP8)
        # 2^-120 aligns e4m3's exponent with float32's, subnormals too; then round half to even.
        bits = (clamped * 7.52316384526264e-37).to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        stored = (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)
    return stored


def quantise_oracle(values: Tensor, kv_format: int) -> tuple[Tensor, Tensor]:
    """``[..., head_dim]`` -> 8 bit data of that shape and float16 scales ``[...]``."""
    wide = values.float()
    scales = (wide.abs().amax(-1) / MOST[kv_format]).half()
    inverse = torch.where(scales > 0, 1 / scales.float().clamp_min(1e-30), 0)
    scaled = (wide * inverse.unsqueeze(-1)).clamp(-MOST[kv_format], MOST[kv_format])
    if kv_format == INT8:
        return (scaled + 0.5).floor().to(torch.int8), scales
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def dequantise_oracle(view: KvView) -> Tensor:
    """A view's values in float32, whatever its format."""
    if view.scales is None:
        return view.data.float()
    is_int8 = view.format == INT8
    elements = view.data if is_int8 else view.data.view(torch.float8_e4m3fn)
    return elements.float() * view.scales.float().unsqueeze(-1)
