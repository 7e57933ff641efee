# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""Gated activations: SiLU or GELU of the first half of a row, times the second half.

SwiGLU and GEGLU of https://arxiv.org/abs/2002.05202; GELU by its tanh form, as Gemma computes it.
Knows nothing of models. Called by ``ops``.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.gpu.configs import ACTIVATION


@triton.jit
def gated_activation_kernel(
    output,  # *T [rows, columns], contiguous
    gate_up,  # *T [rows, 2 * columns], rows gate_up_stride apart
    gate_up_stride,  # i64
    columns,  # i32
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    """Grid (rows, ceil(columns / BLOCK)): some columns of one row, in float32."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = at < columns
    start = gate_up + row * gate_up_stride
    gate = tl.load(start + at, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(start + columns + at, mask=is_column, other=0.0).to(tl.float32)
    steep = gate
    if IS_GELU:
        # x * (1 + tanh(y)) / 2 is x * sigmoid(2 y).
        steep = gate * (1.5957691216057308 + 0.0713548162726 * gate * gate)
    # By the exponential of what is not positive, which cannot overflow.
    small = tl.exp(-tl.abs(steep))
    activated = gate * tl.where(steep >= 0.0, 1.0, small) / (1.0 + small)
    tl.store(output + row * columns + at, (activated * up).to(output.dtype.element_ty), is_column)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``[rows, 2 * n] -> [rows, n]``."""
    return _launch(gate_up, is_gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """``[rows, 2 * n] -> [rows, n]``."""
    return _launch(gate_up, is_gelu=True)


def _launch(gate_up: Tensor, is_gelu: bool) -> Tensor:
    num_rows, columns = len(gate_up), gate_up.shape[1] // 2
    output = torch.empty((num_rows, columns), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        gated_activation_kernel[(num_rows, triton.cdiv(columns, ACTIVATION.block_n))](
            output, gate_up, gate_up.stride(0), columns,
            BLOCK=ACTIVATION.block_n, IS_GELU=is_gelu,
            num_warps=ACTIVATION.num_warps, num_stages=ACTIVATION.num_stages,
        )  # fmt: skip
    return output


def gated_activation_oracle(gate_up: Tensor, is_gelu: bool) -> Tensor:
    """As the definition reads, in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated = F.gelu(gate, approximate="tanh") if is_gelu else gate * torch.sigmoid(gate)
    return (activated * up).to(gate_up.dtype)
