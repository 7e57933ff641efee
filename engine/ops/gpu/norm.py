# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""RMS norm of rows, with or without adding a residual first: one read of everything.

https://arxiv.org/abs/1910.07467. Knows nothing of models. Called by ``ops``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.gpu.configs import MOST_NORM, norm_config, power_of_two


@triton.jit
def rms_norm_kernel(
    output,  # *T [rows, COLUMNS], contiguous
    summed,  # *T [rows, COLUMNS], contiguous; written where HAS_RESIDUAL
    x,  # *T [rows, COLUMNS], rows x_stride apart
    residual,  # *T [rows, COLUMNS], contiguous; read where HAS_RESIDUAL
    weight,  # *T [COLUMNS]
    x_stride,  # i64
    eps,  # f32
    COLUMNS: tl.constexpr,
    PAD: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Grid (rows,): one row, in float32."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PAD)
    is_column = columns < COLUMNS
    wide = tl.load(x + row * x_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual + row * COLUMNS + columns, mask=is_column, other=0.0)
        kept = wide.to(summed.dtype.element_ty)
        tl.store(summed + row * COLUMNS + columns, kept, mask=is_column)
        # What the next layer will add to is the rounded sum: norm that one.
        wide = kept.to(tl.float32)
    shrink = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / COLUMNS + eps)
    normed = wide * shrink * tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(output + row * COLUMNS + columns, normed.to(output.dtype.element_ty), mask=is_column)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``[rows, columns]`` normed over its columns; rows may be apart."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, and that sum; all ``[rows, columns]``."""
    return _launch(x, residual, weight, eps)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = x.shape
    if num_columns > MOST_NORM:
        raise ValueError(f"norm of {num_columns} columns: a program holds at most {MOST_NORM}")
    output = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    summed = output if residual is None else torch.empty_like(output)
    config = norm_config(num_columns)
    if num_rows:
        rms_norm_kernel[(num_rows,)](
            output, summed, x, x if residual is None else residual, weight, x.stride(0), eps,
            COLUMNS=num_columns, PAD=power_of_two(num_columns), HAS_RESIDUAL=residual is not None,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return output, summed


def rms_norm_oracle(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Norm and sum (``x`` itself without a residual), as their definition reads."""
    summed = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = summed.float()
    shrink = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * shrink * weight.float()).to(x.dtype), summed
