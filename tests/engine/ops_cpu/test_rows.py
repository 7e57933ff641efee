"""Norm and embedding lookup against their definitions."""

import ctypes

import numpy as np
import pytest

from engine.ops.cpu import bindings, reference
from tests.engine.ops_cpu.kernels import Kernels


@pytest.mark.parametrize("rows", [0, 1, 13])
@pytest.mark.parametrize("size", [32, 96, 576, 1536])
def test_rms_norm(kernels: Kernels, rows: int, size: int) -> None:
    random = np.random.default_rng(rows + size)
    x = random.standard_normal((rows, size)).astype(np.float32)
    weight = random.standard_normal(size).astype(np.float32)

    y = kernels.rms_norm(x, weight, 1e-5)

    assert np.allclose(y, reference.rms_norm(x, weight, 1e-5), rtol=1e-6, atol=1e-6)


def test_rms_norm_of_zeros_is_zero(kernels: Kernels) -> None:
    assert not kernels.rms_norm(np.zeros((2, 64), np.float32), np.ones(64, np.float32), 1e-5).any()


@pytest.mark.parametrize("kind", [bindings.FLOAT32, bindings.BFLOAT16, bindings.Q8_0])
def test_embedding_rows(kernels: Kernels, kind: int) -> None:
    vocab, hidden = 50, 96
    table = np.random.default_rng(0).standard_normal((vocab, hidden)).astype(np.float32)
    ids = np.array([0, 49, 7, 7, 23], np.int32)
    if kind == bindings.Q8_0:
        import gguf

        q8_0 = gguf.GGMLQuantizationType.Q8_0
        stored = gguf.quantize(table, q8_0)
        values = gguf.dequantize(stored, q8_0)
    elif kind == bindings.BFLOAT16:
        values = reference.bfloat16(table)
        stored = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        stored = values = table
    model = bindings.Model(
        hidden_size=hidden,
        vocab_size=vocab,
        embedding=stored.ctypes.data,
        embedding_kind=kind,
    )
    y = np.full((len(ids), hidden), np.nan, np.float32)

    kernels.native.kvr_embed(ctypes.addressof(model), ids.ctypes.data, len(ids), y.ctypes.data)

    assert (y == values[ids]).all()


def test_float16_scales_of_every_kind_of_number(kernels: Kernels) -> None:
    """Zero, subnormals, the largest: an embedding row of one block each."""
    scales = np.array([0, 6e-8, -6e-8, 6e-5, 65504, -1.5], np.float16)
    blocks = np.zeros((len(scales), 34), np.uint8)
    blocks[:, :2] = scales[:, None].view(np.uint8).reshape(-1, 2)
    blocks[:, 2:] = 1
    model = bindings.Model(
        hidden_size=32,
        vocab_size=len(scales),
        embedding=blocks.ctypes.data,
        embedding_kind=bindings.Q8_0,
    )
    ids = np.arange(len(scales), dtype=np.int32)
    y = np.empty((len(scales), 32), np.float32)

    kernels.native.kvr_embed(ctypes.addressof(model), ids.ctypes.data, len(ids), y.ctypes.data)

    assert (y == scales.astype(np.float32)[:, None]).all()
