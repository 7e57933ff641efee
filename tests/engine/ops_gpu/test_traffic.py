"""Bytes that kernels ask for in the interpreter, against what ``traffic`` says; and far offsets."""

import mmap

import pytest
import torch

from engine.ops.gpu import traffic
from engine.ops.gpu.attention_tile import attend_oracle
from engine.ops.gpu.configs import LEAST_SPLIT, decode_config, prefill_config
from engine.ops.gpu.copy_blocks import copy_blocks
from engine.ops.gpu.decode_attention import decode_attention, make_partials
from engine.ops.gpu.kv_format import INT8, PLAIN, KvView
from engine.ops.gpu.ops import GpuOps
from engine.ops.gpu.prefill_attention import tokens_per_tile
from engine.ops.gpu.traffic import Heads
from kvtransfer.layout import KvLayout
from tests.engine.ops_gpu.cases import DEVICE, Shape, make_batch, make_layer
from tests.engine.ops_gpu.interpreter import counted

interpreted = pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter counts bytes")
SHAPE = Shape(128, 4, 2)
LAYOUT = KvLayout("float16", 1, 2, 128, 16)


def heads_of(kv_format: int) -> Heads:
    kv_bytes, scale_bytes = (2, 0) if kv_format == PLAIN else (1, 2)
    return Heads(SHAPE.num_heads, SHAPE.num_kv_heads, 128, 2, kv_bytes, scale_bytes)


def moved_by_attention(spans: list[tuple[int, int]], kv_format: int, num_splits: int) -> int:
    batch = make_batch(spans, SHAPE.block_size)
    kv = make_layer(batch, SHAPE, torch.float16, kv_format)
    queries = torch.randn(len(batch.token_ids), SHAPE.num_heads, 128).half()
    ops = GpuOps(DEVICE, kv_format, num_splits)
    prepared = ops.prepare_attention(batch, LAYOUT, SHAPE.num_heads)
    with counted() as moved:
        ops.attention(queries, kv, prepared)
    return moved.loaded + moved.stored


def assert_but_for_lists(moved: int, expected: int, columns: int, programs: int) -> None:
    """Beyond tensors: a block id a column of a KV head, and a few numbers a program."""
    assert expected <= moved <= expected + 4 * columns * SHAPE.num_kv_heads + 32 * programs


@interpreted
@pytest.mark.parametrize("kv_format", [PLAIN, INT8])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_reads_k_and_v_once(num_splits: int, kv_format: int) -> None:
    """However many query heads and splits there are."""
    contexts = [1, 17, LEAST_SPLIT, 700]
    used = [1, 1, 1, 3]
    said = traffic.decode_attention(contexts, heads_of(kv_format), num_splits, used)
    moved = moved_by_attention([(c - 1, c) for c in contexts], kv_format, num_splits)
    programs = len(contexts) * (SHAPE.num_kv_heads * num_splits + SHAPE.num_heads)
    assert_but_for_lists(moved, said.moved, sum(contexts), programs)


@interpreted
@pytest.mark.parametrize("kv_format", [PLAIN, INT8])
def test_prefill_reads_a_context_once_a_tile(kv_format: int) -> None:
    spans = [(0, 70), (100, 133), (5, 8)]
    config = prefill_config(128, 2, kv_format != PLAIN, GpuOps(DEVICE).chip)
    tokens = tokens_per_tile(config, SHAPE.group)
    said = traffic.prefill_attention(spans, heads_of(kv_format), tokens)
    columns = said.moved // heads_of(kv_format).token_bytes
    moved = moved_by_attention(spans, kv_format, 1)
    assert_but_for_lists(moved, said.moved, columns, 12 * SHAPE.num_kv_heads)


@interpreted
def test_elementwise_kernels_move_what_they_must() -> None:
    ops, heads = GpuOps(DEVICE), heads_of(PLAIN)
    x = torch.randn(7, 576).half()
    with counted() as moved:
        ops.add_rms_norm(x, x, x[0], 1e-5)
    assert moved.loaded + moved.stored == traffic.rms_norm(7, 576, 2, True).moved
    with counted() as moved:
        ops.silu_mul(x)
    assert moved.loaded + moved.stored == traffic.gated_activation(7, 288, 2).moved
    layer = torch.zeros(4, 2, 16, 2, 128).half()
    with counted() as moved:
        copy_blocks(layer, layer, torch.tensor([0]), torch.tensor([1]))
    assert moved.loaded + moved.stored == traffic.copy_blocks(1, layer[0].nbytes).moved + 2 * 16
    angles, rows = torch.rand(7, 64), torch.arange(7)
    with counted() as moved:
        ops.rotate_and_store(torch.randn(7, 12, 128).half(), angles, angles, layer, rows)
    # And the place of each row, once a program.
    assert moved.loaded + moved.stored == traffic.rotate_and_store(7, heads).moved + 7 * 3 * 8


@interpreted
@pytest.mark.parametrize("block_size", [16, 64])
def test_blocks_beyond_two_gibi_elements(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 32 bit product of block id and stride would wrap round. Only touched pages are real."""
    from triton.runtime.interpreter import GridExecutor

    # It would copy all of the memory onto itself.
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)
    region = 2 * block_size * 2 * 256
    shape = (2**31 // region + 2, 2, block_size, 2, 256)
    assert (shape[0] - 1) * region > 2**31
    memory = mmap.mmap(-1, shape[0] * region * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    layer = torch.frombuffer(memory, dtype=torch.float16).view(shape)
    far = shape[0] - 1
    layer[far] = torch.randn(shape[1:]).half()
    kv, table = KvView(layer), torch.tensor([[far]], dtype=torch.int32)
    queries = torch.randn(1, 2, 256).half()
    output = torch.empty_like(queries)
    decode_attention(
        queries, kv, table, torch.tensor([0], dtype=torch.int32),
        torch.tensor([16], dtype=torch.int32), make_partials(1, 2, 256, 1, DEVICE), output,
        decode_config(256, 2, GpuOps(DEVICE).chip), 1 / 16,
    )  # fmt: skip
    expected = attend_oracle(queries, kv, table[0], 15, 1 / 16)
    torch.testing.assert_close(output.float(), expected, atol=4e-3, rtol=2e-3)
