"""What is written to blocks and moved between them: rotary's KV, copies, the wire form, 8 bits."""

import itertools

import pytest
import torch
from torch import Tensor

from engine.kv.cache import key_rows
from engine.ops.gpu.configs import BLOCK_SIZES, HEAD_DIMS
from engine.ops.gpu.copy_blocks import copy_blocks, copy_blocks_oracle
from engine.ops.gpu.kv_format import (
    FP8,
    INT8,
    MOST,
    PLAIN,
    KvView,
    dequantise_oracle,
    quantise_oracle,
    quantised_region_bytes,
    view_quantised,
)
from engine.ops.gpu.ops import GpuOps
from engine.ops.gpu.rotary import rotate_oracle, store_oracle
from engine.ops.gpu.wire_form import WireForm, move_oracle, pack, unpack
from tests.engine.ops_gpu.cases import DEVICE, ROUNDING, sample

OPS = GpuOps(DEVICE)
FORMATS = (PLAIN, INT8, FP8)
NUM_BLOCKS = 5


def empty_layer(
    kv_format: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype
) -> KvView:
    """All zeros."""
    if kv_format == PLAIN:
        sizes = (NUM_BLOCKS, 2, block_size, heads, head_dim)
        return KvView(torch.zeros(sizes, dtype=dtype, device=DEVICE))
    region = quantised_region_bytes(block_size, heads, head_dim)
    memory = torch.zeros(NUM_BLOCKS, region, dtype=torch.uint8, device=DEVICE)
    return view_quantised(memory, kv_format, block_size, heads, head_dim)


def random_layer(
    kv_format: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype
) -> KvView:
    view = empty_layer(kv_format, block_size, heads, head_dim, dtype)
    values = torch.randn(view.data.shape)
    if view.scales is None:
        view.data.copy_(values)
    else:
        data, scales = quantise_oracle(values, kv_format)
        view.data.copy_(data)
        view.scales.copy_(scales)
    return view


def shuffled_slots(count: int, block_size: int) -> Tensor:
    return torch.randperm(NUM_BLOCKS * block_size)[:count].to(DEVICE)


def assert_stored(got: KvView, expected: KvView, dtype: torch.dtype) -> None:
    """Equal, but for values that float32's last bits put on the other side of a rounding.

    Such a value is one step of its format away: of int8 one, of e4m3 the next code; a scale, taken
    from the largest value, one step of float16.
    """
    if got.scales is None or expected.scales is None:
        atol, rtol = 8 * ROUNDING[torch.float32], 2 * ROUNDING[dtype]
        torch.testing.assert_close(got.data, expected.data, atol=atol, rtol=rtol)
        return
    torch.testing.assert_close(got.scales, expected.scales, atol=0, rtol=2.0**-10)
    apart = (got.data.int() - expected.data.int()).abs()
    assert apart.max() <= 1
    # Ties are rare: more of them would be another way of rounding.
    assert apart.float().mean() < 0.02


# A scale must fit the wire: whatever is quantised comes back to within half a step.
@pytest.mark.parametrize("kv_format", [INT8, FP8])
def test_oracle_quantises_to_half_a_step(kv_format: int) -> None:
    values = torch.randn(50, 64)
    data, scales = quantise_oracle(values, kv_format)
    back = dequantise_oracle(KvView(data, scales))
    scale = scales.float().unsqueeze(-1)
    # int8: half a scale. e4m3: 2^-4 of a value, or of its smallest normal number. Where float16
    # rounded the scale down, the largest is clamped: one rounding of it more.
    step = 0.5 * scale if kv_format == INT8 else values.abs().clamp_min(2.0**-6 * scale) / 16
    assert ((back - values).abs() <= 1.01 * step + MOST[kv_format] * scale * 2.0**-11).all()


STORE_CASES = itertools.product(FORMATS, HEAD_DIMS, BLOCK_SIZES, ROUNDING)


@pytest.mark.parametrize(
    ("kv_format", "head_dim", "block_size", "dtype"), sample(STORE_CASES, 5), ids=str
)
def test_rotate_and_store(
    kv_format: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    num_rows, query_heads, kv_heads = 7, 6, 2
    shape = (num_rows, query_heads + 2 * kv_heads, head_dim)
    heads = torch.randn(shape, device=DEVICE).to(dtype)
    angles = torch.rand(num_rows, head_dim // 2, device=DEVICE) * 1000
    cos, sin = angles.cos(), angles.sin()
    rows = key_rows(shuffled_slots(num_rows, block_size), block_size)
    got = empty_layer(kv_format, block_size, kv_heads, head_dim, dtype)
    expected = empty_layer(kv_format, block_size, kv_heads, head_dim, dtype)

    queries = OPS.rotate_and_store(heads, cos, sin, got, rows)
    turned = rotate_oracle(heads[:, : query_heads + kv_heads], cos, sin)
    store_oracle(turned[:, query_heads:], heads[:, query_heads + kv_heads :], expected, rows)

    atol, rtol = 8 * ROUNDING[torch.float32], 2 * ROUNDING[dtype]
    torch.testing.assert_close(queries, turned[:, :query_heads], atol=atol, rtol=rtol)
    assert_stored(got, expected, dtype)


def test_store_of_zeros_has_scale_zero() -> None:
    layer = random_layer(INT8, 16, 2, 64, torch.float16)
    heads = torch.zeros(1, 6, 64, dtype=torch.float16, device=DEVICE)
    turns = torch.ones(1, 32, device=DEVICE)
    OPS.rotate_and_store(heads, turns, turns, layer, torch.tensor([3], device=DEVICE))
    assert layer.scales is not None
    assert not layer.scales[0, :, 3].any() and not layer.data[0, :, 3].any()
    assert layer.scales[0, :, 4].all()


def test_no_rows_store_nothing() -> None:
    layer = random_layer(PLAIN, 16, 2, 64, torch.float32)
    before = layer.data.clone()
    turns, rows = torch.ones(0, 32, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    heads = torch.zeros(0, 6, 64, device=DEVICE)
    assert OPS.rotate_and_store(heads, turns, turns, layer, rows).shape == (0, 2, 64)
    assert torch.equal(layer.data, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("pairs", [0, 1, 3])
def test_copy_blocks_within_a_layer(pairs: int, dtype: torch.dtype) -> None:
    layer = torch.randint(0, 100, (8, 2, 16, 3, 64), device=DEVICE).to(dtype)
    expected = layer.clone()
    ids = torch.randperm(8, device=DEVICE)
    copy_blocks_oracle(expected, expected, ids[:pairs], ids[pairs : 2 * pairs])
    copy_blocks(layer, layer, ids[:pairs], ids[pairs : 2 * pairs])
    assert torch.equal(layer, expected)


def test_copy_blocks_out_to_staging_and_back() -> None:
    """Quantised regions travel whole, scales included."""
    region = quantised_region_bytes(16, 3, 80)
    memory = torch.randint(0, 256, (6, region), dtype=torch.uint8, device=DEVICE)
    staging = torch.zeros(2, region, dtype=torch.uint8, device=DEVICE)
    ids, there = torch.tensor([4, 1], device=DEVICE), torch.arange(2, device=DEVICE)
    copy_blocks(memory, staging, ids, there)
    assert torch.equal(staging, memory[ids])
    back = torch.zeros_like(memory)
    copy_blocks(staging, back, there, ids)
    assert torch.equal(back[ids], memory[ids])
    assert not back[[0, 2, 3, 5]].any()


WIRE_CASES = itertools.product(FORMATS, FORMATS, HEAD_DIMS, BLOCK_SIZES, (1, 17))


def empty_wire(tokens: int, wire_format: int, head_dim: int, dtype: torch.dtype) -> WireForm:
    kind = {PLAIN: dtype, INT8: torch.int8, FP8: torch.uint8}[wire_format]
    data = torch.zeros(tokens, 2, 3, head_dim, dtype=kind, device=DEVICE)
    scales = torch.zeros(tokens, 2, 3, dtype=torch.float16, device=DEVICE)
    return WireForm(data, None if wire_format == PLAIN else scales)


@pytest.mark.parametrize(
    ("cache_format", "wire_format", "head_dim", "block_size", "tokens"),
    sample(WIRE_CASES, 9),
    ids=str,
)
def test_pack_and_unpack(
    cache_format: int, wire_format: int, head_dim: int, block_size: int, tokens: int
) -> None:
    """Against the oracle, from blocks of one size to blocks of another."""
    torch.manual_seed(0)
    layer = random_layer(cache_format, block_size, 3, head_dim, torch.float16)
    slots = shuffled_slots(tokens, block_size)
    wire, expected = (empty_wire(tokens, wire_format, head_dim, torch.bfloat16) for _ in range(2))
    pack(layer, slots, wire)
    in_order = torch.arange(tokens, device=DEVICE)
    move_oracle(layer, slots, expected.as_blocks, in_order)
    assert_stored(wire.as_blocks, expected.as_blocks, torch.bfloat16)

    there, expected_there = (empty_layer(cache_format, 32, 3, head_dim, torch.float16)
                             for _ in range(2))  # fmt: skip
    places = shuffled_slots(tokens, 32)
    unpack(wire, there, places)
    move_oracle(wire.as_blocks, in_order, expected_there, places)
    assert_stored(there, expected_there, torch.float16)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_equal_formats_move_bit_for_bit(kv_format: int) -> None:
    layer = random_layer(kv_format, 16, 3, 80, torch.float16)
    slots = shuffled_slots(20, 16)
    wire = empty_wire(20, kv_format, 80, torch.float16)
    pack(layer, slots, wire)
    there = empty_layer(kv_format, 64, 3, 80, torch.float16)
    unpack(wire, there, slots)
    at, to = (slots // 16, slice(None), slots % 16), (slots // 64, slice(None), slots % 64)
    assert torch.equal(there.data[to], layer.data[at])
    if there.scales is not None and layer.scales is not None:
        assert torch.equal(there.scales[to], layer.scales[at])
