"""Panels hold exactly the values they were packed from, where ``native/panels.h`` says."""

import numpy as np
import pytest

from engine.ops.cpu import bindings, pack
from engine.ops.cpu.memory import ALIGNMENT, HUGE_PAGE, Arena, padded
from tests.engine.ops_cpu.kernels import GGUF_TYPES, packed


def panels_of(matrix) -> np.ndarray:
    """The packed bytes, [panels, bytes of a panel]."""
    out = matrix.keep[0]
    return out.reshape(-1, pack.panel_bytes(matrix.struct.kind, matrix.struct.inputs))


def unpacked(matrix) -> np.ndarray:
    """[outputs, inputs] read back by the layout's definition, padding included."""
    kind, inputs = matrix.struct.kind, matrix.struct.inputs
    panels = panels_of(matrix)
    if kind == bindings.FLOAT32:
        lanes = panels.view(np.float32).reshape(len(panels), inputs, 32)
        return lanes.swapaxes(1, 2).reshape(-1, inputs).astype(float)
    if kind == bindings.BFLOAT16:
        pairs = panels.view(np.uint16).reshape(len(panels), inputs // 2, 32, 2).astype(np.uint32)
        values = (pairs << 16).view(np.float32).transpose(0, 2, 1, 3)
        return values.reshape(-1, inputs).astype(float)
    group = 64 if kind == bindings.INT8 else 32
    blocks = panels.reshape(len(panels), inputs // group, -1)
    scale_type = np.float32 if kind == bindings.INT8 else np.float16
    at = 32 * np.dtype(scale_type).itemsize
    scales = blocks[..., :at].copy().view(scale_type).astype(float)
    minima = np.zeros_like(scales)
    if kind == bindings.Q4_1:
        minima = blocks[..., at : 2 * at].copy().view(np.float16).astype(float)
        at *= 2
    quads = blocks[..., at:].reshape(*blocks.shape[:2], -1, 32, 4)
    if kind in (bindings.Q4_0, bindings.Q4_1):
        integers = np.concatenate([quads & 15, quads >> 4], axis=2).astype(float)
        integers -= 8 if kind == bindings.Q4_0 else 0
    else:
        integers = quads.astype(float) - 128
    # panel, group, column, quad, input of the quad
    by_column = integers.transpose(0, 1, 3, 2, 4).reshape(*blocks.shape[:2], 32, group)
    values = by_column * scales[..., None] + minima[..., None]
    return values.transpose(0, 2, 1, 3).reshape(-1, inputs)


@pytest.mark.parametrize("kind", range(6), ids=bindings.KIND_NAMES)
@pytest.mark.parametrize("outputs,inputs", [(32, 64), (64, 192), (80, 128), (1, 64)])
def test_every_value_is_where_it_belongs(kind: int, outputs: int, inputs: int) -> None:
    weight = np.random.default_rng(kind).standard_normal((outputs, inputs)).astype(np.float32)
    matrix = packed(weight, kind)

    values = unpacked(matrix)

    assert (values[:outputs] == matrix.values).all()
    assert not values[outputs:].any()


@pytest.mark.parametrize("kind", [bindings.INT8, bindings.Q8_0])
def test_quantised_floats_are_within_half_a_step(kind: int) -> None:
    group = 64 if kind == bindings.INT8 else 32
    weight = np.random.default_rng(1).standard_normal((32, 256)).astype(np.float32)
    weight[3, :64] = 0
    out = Arena(pack.packed_bytes(kind, 32, 256)).take(pack.packed_bytes(kind, 32, 256))
    pack.pack_floats(weight, kind, out)
    struct = bindings.Linear(outputs=32, inputs=256, kind=kind)

    class Stored:
        def __init__(self) -> None:
            self.struct, self.keep = struct, (out,)

    values = unpacked(Stored())
    steps = np.abs(weight.reshape(32, -1, group)).max(axis=2) / 127
    # A float16 scale is itself off by up to 2^-11.
    allowed = np.repeat(steps, group, axis=1) * (0.5 + 127 * 2**-11)
    assert (np.abs(values - weight) <= allowed).all()


def test_rounds_to_nearest_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(2).standard_normal(10_000).astype(np.float32)
    values[:4] = [1 + 2**-8, 1 + 3 * 2**-8, 0, -1]  # ties go to even

    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()

    assert (pack.to_bfloat16(values).view(np.int16) == expected).all()


def test_gate_and_up_rows_alternate_by_sixteen() -> None:
    gate, up = np.arange(32)[:, None], np.arange(100, 132)[:, None]

    rows = pack.interleave_gate_up(gate, up)[:, 0]

    assert rows.tolist() == [*range(16), *range(100, 116), *range(16, 32), *range(116, 132)]


def test_rows_of_blocks_can_be_taken_in_another_order() -> None:
    data = np.arange(3 * 36, dtype=np.uint8).reshape(3, 36)
    blocks = pack.RawBlocks("Q4_0", data)

    assert blocks.inputs == 64
    assert (blocks.take_rows(np.array([2, 0, 1])).data == data[[2, 0, 1]]).all()
    assert all(pack.is_packable(name) for name in GGUF_TYPES.values())
    assert not pack.is_packable("Q6_K")


def test_an_arena_hands_out_aligned_memory_until_it_is_full() -> None:
    arena = Arena(padded(100) + 64)
    first, second = arena.take(100), arena.take(64)

    assert first.ctypes.data % HUGE_PAGE == 0
    assert second.ctypes.data - first.ctypes.data == 2 * ALIGNMENT
    assert not first.any() and not second.any()
    with pytest.raises(MemoryError):
        arena.take(1)
