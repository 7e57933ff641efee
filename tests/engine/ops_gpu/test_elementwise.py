"""Norms, activations and rotary against their definitions, and against the seam's reference."""

import pytest
import torch
from torch import Tensor

from engine.ops.gpu.activation import gated_activation_oracle
from engine.ops.gpu.configs import HEAD_DIMS, MOST_NORM
from engine.ops.gpu.norm import rms_norm_oracle
from engine.ops.gpu.ops import GpuOps
from engine.ops.gpu.rotary import rotate_oracle
from engine.ops.reference import ReferenceOps
from tests.engine.ops_gpu.cases import DEVICE, ROUNDING

OPS, REFERENCE = GpuOps(DEVICE), ReferenceOps()
DTYPES = pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
ROWS = pytest.mark.parametrize("num_rows", [0, 1, 7])


def assert_rounded(got: Tensor, expected: Tensor) -> None:
    """Both were float32 until the last rounding: they may fall to either side of a tie."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    # A few float32 roundings apart before; one step of the type after.
    rtol = 16 * ROUNDING[torch.float32] + 2 * ROUNDING[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), atol=1e-7, rtol=rtol)


@ROWS
@DTYPES
@pytest.mark.parametrize("columns", [1, 15, 576, 4096])
def test_rms_norm(num_rows: int, columns: int, dtype: torch.dtype) -> None:
    x = (torch.randn(num_rows, columns + 3, device=DEVICE) * 5).to(dtype)[:, :columns]
    weight = torch.randn(columns, device=DEVICE).to(dtype)
    got = OPS.rms_norm(x, weight, 1e-5)
    assert_rounded(got, rms_norm_oracle(x, None, weight, 1e-5)[0])
    assert_rounded(got, REFERENCE.rms_norm(x, weight, 1e-5))


@ROWS
@DTYPES
def test_norm_of_a_sum(num_rows: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(num_rows, 576, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(576, device=DEVICE).to(dtype)
    normed, summed = OPS.add_rms_norm(x, residual, weight, 1e-5)
    expected = rms_norm_oracle(x, residual, weight, 1e-5)
    # The sum is one rounding of an exact sum in float32: the same bits.
    assert torch.equal(summed, expected[1])
    assert_rounded(normed, expected[0])


def test_norm_of_zeros_is_zeros() -> None:
    zeros = torch.zeros(2, 576, device=DEVICE)
    assert not OPS.rms_norm(zeros, torch.ones(576, device=DEVICE), 1e-5).any()


def test_a_norm_too_wide_for_a_program_is_refused() -> None:
    x = torch.zeros(1, MOST_NORM + 1, device=DEVICE)
    with pytest.raises(ValueError, match="16385 columns"):
        OPS.rms_norm(x, x[0], 1e-5)


@ROWS
@DTYPES
@pytest.mark.parametrize("columns", [1, 17, 1536])
@pytest.mark.parametrize("is_gelu", [False, True])
def test_gated_activation(num_rows: int, columns: int, is_gelu: bool, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(num_rows, 2 * columns, device=DEVICE) * 3).to(dtype)
    got = OPS.gelu_mul(gate_up) if is_gelu else OPS.silu_mul(gate_up)
    expected = gated_activation_oracle(gate_up, is_gelu)
    # The tail of GELU is a difference of nearly equal numbers in the definition, not in the kernel.
    atol = 8 * ROUNDING[torch.float32] * float(gate_up.abs().max()) ** 2 if num_rows else 0.0
    rtol = 16 * ROUNDING[torch.float32] + 2 * ROUNDING[dtype]
    torch.testing.assert_close(got.float(), expected.float(), atol=atol + 1e-7, rtol=rtol)
    if not is_gelu:
        assert_rounded(got, REFERENCE.silu_mul(gate_up))


def test_activations_of_large_numbers() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 2.0, 3.0]], device=DEVICE)
    assert OPS.silu_mul(gate_up).tolist() == [[0.0, 3e4]]
    assert OPS.gelu_mul(gate_up).tolist() == [[0.0, 3e4]]


@ROWS
@DTYPES
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotary(num_rows: int, head_dim: int, dtype: torch.dtype) -> None:
    # A slice of wider rows, as the model passes it; more heads than one program takes.
    x = torch.randn(num_rows, 9, head_dim, device=DEVICE).to(dtype)[:, :7]
    angles = torch.rand(num_rows, head_dim // 2, device=DEVICE) * 1000
    cos, sin = angles.cos(), angles.sin()
    got = OPS.rotary(x, cos, sin)
    # Two products and their sum: a difference may cancel, so the error is the terms'.
    atol = 4 * ROUNDING[torch.float32] * float(x.abs().max()) if num_rows else 0.0
    rtol = 2 * ROUNDING[dtype]
    for expected in (rotate_oracle(x, cos, sin), REFERENCE.rotary(x, cos, sin)):
        torch.testing.assert_close(got.float(), expected.float(), atol=atol, rtol=rtol)
