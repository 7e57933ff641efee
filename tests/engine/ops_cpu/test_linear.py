"""Every weight kind against its definition, over odd shapes, with every epilogue."""

import numpy as np
import pytest

from engine.ops.cpu import bindings, pack, reference
from tests.engine.ops_cpu.kernels import Kernels, PackedMatrix, packed

KINDS = range(len(bindings.KIND_NAMES))
by_kind = pytest.mark.parametrize("kind", KINDS, ids=bindings.KIND_NAMES)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_close(y: np.ndarray, expected: np.ndarray, x: np.ndarray, matrix: PackedMatrix) -> None:
    """Within what summing ``inputs`` float32 products in any order may lose.

    Each of n additions rounds by at most eps / 2 of a partial sum, which is at most the sum of
    magnitudes; roundings of either sign add up like the root of n.
    """
    weights = np.abs(matrix.values)
    if matrix.struct.kind == bindings.Q4_1:
        # Summed as scale * integer and minimum apart: each may be large where the weight is not.
        weights = weights + weights.max()
    magnitudes = np.abs(reference.activations(x, matrix.struct.kind)) @ weights.T
    eps = np.finfo(np.float32).eps
    worst = (np.abs(y - expected) / (magnitudes + 1)).max(initial=0)
    assert worst <= eps * (2 + np.sqrt(x.shape[1]))


@by_kind
@pytest.mark.parametrize("rows", [1, 2, 7, 13, 97])
@pytest.mark.parametrize("outputs,inputs", [(32, 64), (96, 576), (64, 1536)])
def test_equals_the_definition(
    kernels: Kernels, kind: int, rows: int, outputs: int, inputs: int
) -> None:
    matrix = packed(random(outputs, inputs, seed=1), kind)
    x = random(rows, inputs, seed=2)

    y = kernels.linear(matrix, x)

    assert_close(y, reference.linear(x, matrix.values, kind), x, matrix)


@by_kind
def test_no_rows(kernels: Kernels, kind: int) -> None:
    assert kernels.linear(packed(random(32, 64), kind), random(0, 64)).shape == (0, 32)


@by_kind
@pytest.mark.parametrize("outputs", [1, 31, 33, 80])
def test_outputs_need_not_fill_a_panel(kernels: Kernels, kind: int, outputs: int) -> None:
    matrix = packed(random(outputs, 128), kind)
    x, before = random(5, 128, seed=3), random(5, outputs, seed=4)

    assert_close(kernels.linear(matrix, x), reference.linear(x, matrix.values, kind), x, matrix)
    summed = before + reference.linear(x, matrix.values, kind)
    assert_close(kernels.linear(matrix, x, add_to=before), summed, x, matrix)


@by_kind
def test_adds_bias_and_residual(kernels: Kernels, kind: int) -> None:
    bias = random(64, seed=5)
    matrix = packed(random(64, 192), kind, bias)
    x, before = random(7, 192, seed=6), random(7, 64, seed=7)

    y = kernels.linear(matrix, x, add_to=before)

    assert_close(y, before + reference.linear(x, matrix.values, kind, bias), x, matrix)


@by_kind
def test_a_row_does_not_depend_on_its_batch(kernels: Kernels, kind: int) -> None:
    matrix, x = packed(random(64, 256), kind), random(40, 256, seed=8)

    together = kernels.linear(matrix, x)

    for first, last in ((0, 1), (3, 5), (9, 22), (39, 40)):
        alone = kernels.linear(matrix, np.ascontiguousarray(x[first:last]))
        assert (alone == together[first:last]).all()


@by_kind
def test_extreme_activations(kernels: Kernels, kind: int) -> None:
    """Zeros, one huge value in a group, tiny groups: no NaN, and scales stay per group."""
    x = random(3, 128, seed=9)
    x[0] = 0
    x[1, 5] = 1e4
    x[2, 64:] *= 1e-20
    matrix = packed(random(32, 128), kind)

    assert_close(kernels.linear(matrix, x), reference.linear(x, matrix.values, kind), x, matrix)


@by_kind
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("rows", [1, 7, 26])
def test_gated_mlp(kernels: Kernels, kind: int, rows: int, activation: str) -> None:
    hidden, ffn = 64, 192
    gate, up = random(ffn, hidden, seed=10), random(ffn, hidden, seed=11)
    gate_up = packed(pack.interleave_gate_up(gate, up), kind)
    down = packed(random(64, ffn, seed=12), kind)
    x = random(rows, hidden, seed=13)

    y = kernels.gated_mlp(gate_up, down, activation, x)

    halves = gate_up.values.reshape(-1, 2, 16, hidden).swapaxes(0, 1).reshape(2, ffn, hidden)
    gated, upped = (reference.linear(x, half, kind) for half in halves)
    passed = {"silu": reference.silu, "gelu": reference.gelu}[activation](gated)
    middle = (passed * upped).astype(np.float32)
    expected = reference.linear(middle, down.values, kind)
    # What is rounded again half-way may round to the other neighbour, and the exponential is
    # good to 4e-5 where the result is rounded.
    step = {bindings.FLOAT32: 1e-6, bindings.BFLOAT16: 2**-8}.get(kind, 1 / 100)
    bound = step * np.abs(middle).max() * np.abs(down.values).max() * np.sqrt(ffn)
    assert np.abs(y - expected).max() <= bound


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gates_of_any_size(kernels: Kernels, activation: str) -> None:
    """Where a gate is far out, its activation is zero or the gate itself, never NaN."""
    eye = np.eye(32, dtype=np.float32)
    gate_up = packed(pack.interleave_gate_up(eye, eye), bindings.FLOAT32)
    sizes = [0, 1e-30, 1e-4, 0.5, 3, 7.9, 8.1, 20, 88, 1e3, 1e6, 1e15]
    x = np.zeros((2, 32), np.float32)
    x[:, : len(sizes)] = [sizes, np.negative(sizes)]

    y = kernels.gated_mlp(gate_up, packed(eye, bindings.FLOAT32), activation, x)

    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        passed = {"silu": reference.silu, "gelu": reference.gelu}[activation](wide)
    assert np.allclose(y[0], (passed * wide)[0], rtol=1e-5, atol=1e-30)
    assert np.allclose(y[1], (passed * wide)[1], rtol=1e-4, atol=1e-5)


@by_kind
def test_threads_change_nothing(kernels: Kernels, instruction_set, kind: int) -> None:
    matrix, x = packed(random(320, 256), kind), random(33, 256, seed=14)
    many = Kernels(instruction_set, threads=3)
    try:
        for _ in range(20):
            assert (many.linear(matrix, x) == kernels.linear(matrix, x)).all()
    finally:
        many.close()
