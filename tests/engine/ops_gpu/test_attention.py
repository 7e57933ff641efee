"""Paged attention against its definition: odd lengths, heads, blocks, formats and batches."""

import itertools

import pytest
import torch

from engine.errors import ModelError
from engine.ops.gpu.attention_tile import attend_oracle
from engine.ops.gpu.configs import BLOCK_SIZES, HEAD_DIMS
from engine.ops.gpu.kv_format import FP8, INT8, PLAIN
from engine.ops.gpu.ops import GpuOps
from engine.ops.reference import ReferenceOps
from kvtransfer.layout import KvLayout
from tests.engine.ops_gpu.cases import (
    BATCHES,
    DEVICE,
    SHARED,
    Shape,
    attention_bound,
    make_batch,
    make_layer,
    sample,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = (1, 3, 8)


def layout_of(shape: Shape, dtype: torch.dtype) -> KvLayout:
    name = str(dtype).removeprefix("torch.")
    return KvLayout(name, 1, shape.num_kv_heads, shape.head_dim, shape.block_size)


def check(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    kv_format: int = PLAIN,
    window: int | None = None,
    soft_cap: float | None = None,
    num_splits: int | None = 2,
) -> None:
    torch.manual_seed(0)
    batch = make_batch(BATCHES[name], shape.block_size, name == SHARED)
    kv = make_layer(batch, shape, dtype, kv_format)
    # Queries as a model has them: the first heads of wider rows.
    wide = torch.randn(len(batch.token_ids), shape.num_heads + 2, shape.head_dim)
    queries = wide.to(DEVICE, dtype)[:, : shape.num_heads]
    ops = GpuOps(DEVICE, kv_format, num_splits)
    prepared = ops.prepare_attention(batch, layout_of(shape, dtype), shape.num_heads)
    got = ops.attention(queries, kv, prepared, window=window, soft_cap=soft_cap)
    assert got.shape == (len(queries), shape.num_heads * shape.head_dim)
    assert got.dtype == dtype
    for span in batch.spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        table = torch.from_numpy(span.block_table).to(DEVICE)
        limits = (shape.head_dim**-0.5, window, soft_cap)
        expected = attend_oracle(queries[rows], kv, table, span.start, *limits)
        bound = attention_bound(queries[rows], kv, table, span.start, expected, limits)
        mine = got[rows].unflatten(1, (shape.num_heads, shape.head_dim)).float()
        ratio = float(((mine - expected).abs() / bound).nan_to_num(torch.inf).max())
        assert ratio <= 1, f"{span}: {ratio:.2f} times what roundings explain"


# Block sizes take turns over the rest.
PLAIN_CASES = [
    (name, Shape(head_dim, group, 1 if "300" in name else 2, BLOCK_SIZES[i % 3]), dtype)
    for i, (name, group, head_dim, dtype) in enumerate(
        itertools.product(BATCHES, GROUPS, HEAD_DIMS, DTYPES)
    )
]
LIMITED_CASES = [
    (name, Shape(head_dim, group, 1, BLOCK_SIZES[i % 3]), dtype, kv_format, window, soft_cap)
    for i, (name, (head_dim, group), dtype, kv_format, (window, soft_cap)) in enumerate(
        itertools.product(
            ("decode 7", "chunk 300", "chunk 17 at 283", "mixed 7"),
            ((64, 3), (80, 8), (128, 1), (256, 3)),
            (torch.float16, torch.bfloat16),
            (PLAIN, INT8, FP8),
            ((None, None), (1, None), (16, None), (70, 20.0), (400, None), (None, 5.0)),
        )
    )
]


@pytest.mark.parametrize(("name", "shape", "dtype"), sample(PLAIN_CASES, 26), ids=str)
def test_attention(name: str, shape: Shape, dtype: torch.dtype) -> None:
    check(name, shape, dtype)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "kv_format", "window", "soft_cap"),
    sample(LIMITED_CASES, 36),
    ids=str,
)
def test_attention_with_limits_and_quantised(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    kv_format: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    check(name, shape, dtype, kv_format, window, soft_cap)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim(head_dim: int) -> None:
    check("mixed 7", Shape(head_dim, 3), torch.float16)


@pytest.mark.parametrize("window", [2, 33, 70, 100, 200])
def test_a_window_that_ends_anywhere_in_a_tile(window: int) -> None:
    """Columns that some rows see whole, some in part and some not at all are counted once."""
    check("chunk 300", Shape(64, 1, 1), torch.float32, window=window)


@pytest.mark.parametrize("num_splits", [1, 2, 4, 16])
def test_any_number_of_splits(num_splits: int) -> None:
    check("decode 7", Shape(64, 3), torch.float32, num_splits=num_splits)


def test_as_many_splits_as_keep_a_device_busy() -> None:
    check("decode 17", Shape(64, 2, num_kv_heads=1), torch.float32, num_splits=None)


def test_float32_agrees_with_the_reference_of_the_seam() -> None:
    """Two oracles, written apart."""
    shape = Shape(64, 3)
    batch = make_batch(BATCHES["mixed 7"], shape.block_size)
    kv = make_layer(batch, shape, torch.float32, PLAIN)
    queries = torch.randn(len(batch.token_ids), shape.num_heads, shape.head_dim)
    ops, oracle, layout = GpuOps(DEVICE), ReferenceOps(), layout_of(shape, torch.float32)
    prepared = ops.prepare_attention(batch, layout, shape.num_heads)
    got = ops.attention(queries.to(DEVICE), kv.data, prepared).cpu()
    expected = oracle.attention(queries, kv.data.cpu(), batch)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    """With a fixed number of splits, bit for bit; and in a chunk, wherever its tiles begin."""
    shape, ops = Shape(64, 3), GpuOps(DEVICE, num_splits=4)
    layout = layout_of(shape, torch.float32)
    batch = make_batch(BATCHES["mixed 7"], shape.block_size)
    kv = make_layer(batch, shape, torch.float32, PLAIN)
    queries = torch.randn(len(batch.token_ids), shape.num_heads, shape.head_dim, device=DEVICE)
    together = ops.attention(queries, kv, ops.prepare_attention(batch, layout, shape.num_heads))
    for span in batch.spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        alone = type(batch)(
            batch.token_ids[rows],
            batch.positions[rows],
            batch.key_rows[rows],
            (type(span)(0, span.num_rows, span.start, span.block_table),),
            batch.sample_rows,
        )
        prepared = ops.prepare_attention(alone, layout, shape.num_heads)
        assert torch.equal(ops.attention(queries[rows], kv, prepared), together[rows])


def test_a_padded_row_of_a_graph_is_zero() -> None:
    """A row of context 0 reads no block at all, whatever its block table says."""
    from engine.ops.gpu.configs import decode_config
    from engine.ops.gpu.decode_attention import decode_attention, make_partials

    shape = Shape(64, 2, 1)
    batch = make_batch([(4, 5)], shape.block_size)
    kv = make_layer(batch, shape, torch.float32, PLAIN)
    queries = torch.randn(2, shape.num_heads, shape.head_dim, device=DEVICE)
    for num_splits in (1, 2):
        output = torch.full_like(queries, torch.nan)
        decode_attention(
            queries, kv, torch.zeros(2, 1, dtype=torch.int32, device=DEVICE),
            torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
            torch.zeros(2, dtype=torch.int32, device=DEVICE),
            make_partials(2, shape.num_heads, shape.head_dim, num_splits, DEVICE),
            output, decode_config(shape.head_dim, 4, GpuOps(DEVICE).chip), 1.0,
        )  # fmt: skip
        assert not output.any()


@pytest.mark.parametrize(
    ("shape", "dtype", "kv_format", "said"),
    [
        (Shape(72, 1), torch.float16, PLAIN, "head_dim 72"),
        (Shape(64, 1, block_size=8), torch.float16, PLAIN, "block_size 8"),
        (Shape(64, 256), torch.float16, PLAIN, "256 query heads share"),
        (Shape(64, 1), torch.float32, INT8, "float32 queries over 8 bit"),
    ],
)
def test_what_there_is_no_kernel_for_is_refused(
    shape: Shape, dtype: torch.dtype, kv_format: int, said: str
) -> None:
    batch = make_batch([(0, 1)], 16)
    with pytest.raises(ModelError, match=said):
        GpuOps(DEVICE, kv_format).prepare_attention(batch, layout_of(shape, dtype), shape.num_heads)
