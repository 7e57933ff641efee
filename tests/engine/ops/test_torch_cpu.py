"""The torch path against the oracle: odd shapes, both dtypes, every kind of batch."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.cache import Layer, PagedKvCache, key_rows
from engine.ops.batch import Batch, Span, make_batch
from engine.ops.reference import ReferenceOps
from engine.ops.torch_cpu import MOST_PADDING, TorchCpuOps, group_by_length
from engine.plan import ScheduledSequence
from engine.request import SamplingParams
from kvtransfer.layout import KvLayout

ORACLE, OPS = ReferenceOps(), TorchCpuOps()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
GREEDY = SamplingParams(temperature=0.0)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    atol = 2e-5 if got.dtype == torch.float32 else 0.03
    torch.testing.assert_close(got, expected, atol=atol, rtol=0 if atol < 1e-3 else 0.02)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (65, 576)])
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 5).to(dtype)
    weight = torch.randn(shape[1]).to(dtype)
    assert_close(OPS.rms_norm(x, weight, 1e-5), ORACLE.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_zeros_is_zeros() -> None:
    assert not OPS.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5).any()


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 24), (70, 12, 64)])
def test_rotary(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    # A slice of wider rows, as the model passes it.
    x = torch.randn(shape[0], shape[1] + 2, shape[2]).to(dtype)[:, : shape[1]]
    angles = torch.rand(shape[0], shape[2] // 2) * 1000
    cos, sin = angles.cos(), angles.sin()
    assert_close(OPS.rotary(x, cos, sin), ORACLE.rotary(x, cos, sin))


def test_rotary_pairs_the_halves() -> None:
    """A quarter turn takes dimension i to i + half: Hugging Face's order, not the interleaved."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)
    quarter = OPS.rotary(x, torch.zeros(1, 2), torch.ones(1, 2))
    assert quarter.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0]


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (3, 34), (65, 3072)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape) * 3).to(dtype)
    assert_close(OPS.silu_mul(gate_up), ORACLE.silu_mul(gate_up))


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 130])
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 3), (96, 64), (261, 72)])
def test_linear(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    x = torch.randn(rows, inputs).to(dtype)
    assert_close(OPS.pack_linear(weight)(x), ORACLE.pack_linear(weight)(x))


def test_linear_without_mkldnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    weight, x = torch.randn(5, 3), torch.randn(2, 3)
    assert_close(OPS.pack_linear(weight)(x), x @ weight.T)


def attention_case(
    spans: list[tuple[int, int]], layout: KvLayout, seed: int
) -> tuple[Batch, Layer]:
    """A batch of (start, end) spans over shuffled blocks, and a layer where all else is NaN."""
    draw = random.Random(seed)
    needed = [layout.num_blocks_for(end) for _, end in spans]
    blocks = list(range(sum(needed) + 3))
    draw.shuffle(blocks)
    sequences = []
    for (start, end), count in zip(spans, needed, strict=True):
        table = tuple(blocks.pop() for _ in range(count))
        sequences.append(ScheduledSequence("r", (1,) * (end - start), start, table, True, GREEDY))
    batch = make_batch(tuple(sequences), layout.block_size)
    cache = PagedKvCache(layout, sum(needed) + 3)
    cache.fill(0xFF)  # NaN in every dtype
    dtype = torch.float32 if layout.dtype == "int8" else getattr(torch, layout.dtype)
    for sequence in sequences:
        at = np.arange(sequence.end)
        table = np.array(sequence.block_table)
        slots = table[at // layout.block_size] * layout.block_size + at % layout.block_size
        rows = key_rows(torch.from_numpy(slots), layout.block_size)
        shape = (sequence.end, layout.num_kv_heads, layout.head_dim)
        cache.write(0, rows, torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
    return batch, cache.layers[0]


def check_attention(
    spans: list[tuple[int, int]], layout: KvLayout, num_heads: int, seed: int = 0
) -> None:
    torch.manual_seed(seed)
    batch, layer = attention_case(spans, layout, seed)
    queries = torch.randn(len(batch.token_ids), num_heads, layout.head_dim)
    if layout.dtype != "int8":
        queries = queries.to(getattr(torch, layout.dtype))
    prepared = OPS.prepare_attention(batch, layout, num_heads)
    got = OPS.attention(queries, layer, prepared)
    expected = ORACLE.attention(queries, layer, ORACLE.prepare_attention(batch, layout, num_heads))
    assert got.isfinite().all()
    assert_close(got, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1)],
        [(0, 64)],
        [(0, 65)],
        [(15, 16), (16, 17)],
        [(31, 33)],
        [(40, 200)],
        [(199, 200), (5, 6), (0, 70), (30, 31), (190, 191), (64, 130)],
    ],
    ids=str,
)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 16), (9, 3, 24)])
def test_attention(
    spans: list[tuple[int, int]], dtype: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    check_attention(spans, KvLayout(dtype, 1, num_kv_heads, head_dim, 16), num_heads)


@settings(max_examples=40)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 1, 2, 5, 66])), min_size=1, max_size=6
    ),
    block_size=st.sampled_from([1, 3, 8, 32]),
    heads=st.sampled_from([(1, 1), (6, 2), (5, 1)]),
    seed=st.integers(0, 99),
)
def test_attention_of_any_batch(
    spans: list[tuple[int, int]], block_size: int, heads: tuple[int, int], seed: int
) -> None:
    layout = KvLayout("float32", 1, heads[1], 8, block_size)
    check_attention([(start, start + count) for start, count in spans], layout, heads[0], seed)


@given(ends=st.lists(st.integers(1, 5000), max_size=40))
def test_groups_hold_every_row_once_and_are_hardly_padded(ends: list[int]) -> None:
    table = np.zeros(5000, dtype=np.int64)
    spans = [Span(row, 1, end - 1, table) for row, end in enumerate(ends)]
    groups = list(group_by_length(spans))
    assert sorted(s.first_row for g in groups for s in g) == list(range(len(ends)))
    for group in groups:
        used = sum(span.end for span in group)
        assert max(span.end for span in group) * len(group) <= MOST_PADDING * used
