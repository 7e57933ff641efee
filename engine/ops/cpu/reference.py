"""The oracles of the native kernels: what each computes, written as its definition, in float64.

Rounding that is part of a kernel's contract (bfloat16 inputs, int8 groups) is done here too, so
tests need tolerances for the order of sums only. Knows nothing of panels or blocks of memory:
matrices are plain. Called by tests and by nobody else.
"""

import numpy as np
import numpy.typing as npt

from engine.ops.cpu import bindings

Matrix = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]

_ACTIVATION_GROUPS = {
    bindings.INT8: 64,
    bindings.Q8_0: 32,
    bindings.Q4_0: 32,
    bindings.Q4_1: 32,
}


def bfloat16(values: npt.NDArray[np.floating]) -> Floats:
    """Rounded to the nearest bfloat16, ties to even, as float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def int8_heads(values: Matrix) -> Matrix:
    """``[..., head_dim]`` as an int8 KV cache holds them: max / 127, in float16, times integers."""
    peaks = np.abs(values.astype(np.float32)).max(axis=-1, keepdims=True)
    scales = (peaks / np.float32(127)).astype(np.float16).astype(np.float64)
    inverses = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    return np.clip(np.rint(values * inverses), -127, 127) * scales


def activations(x: Floats, kind: int) -> Matrix:
    """Input rows as a weight kind sees them: rounded to bfloat16, or to int8 in groups."""
    if kind == bindings.FLOAT32:
        return x.astype(np.float64)
    if kind == bindings.BFLOAT16:
        return bfloat16(x).astype(np.float64)
    groups = x.reshape(len(x), -1, _ACTIVATION_GROUPS[kind])
    peaks = np.abs(groups).max(axis=2, keepdims=True)
    inverses = np.divide(np.float32(127), peaks, out=np.zeros_like(peaks), where=peaks > 0)
    values = np.rint(groups * inverses) * (peaks.astype(np.float64) / 127)
    return values.reshape(x.shape)


def linear(x: Floats, weight: Matrix, kind: int, bias: Floats | None = None) -> Matrix:
    """``x``: [rows, inputs]. ``weight``: [outputs, inputs], the values that are stored."""
    product = activations(x, kind) @ weight.T
    return product if bias is None else product + bias


def silu(x: Matrix) -> Matrix:
    """x times its sigmoid."""
    return x / (1 + np.exp(-x))


def gelu(x: Matrix) -> Matrix:
    """Its tanh form."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rms_norm(x: Floats, weight: Floats, eps: float) -> Matrix:
    """Over the last dimension."""
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight


def rotary(x: Matrix, positions: npt.NDArray[np.integer], theta: float) -> Matrix:
    """``x``: [rows, heads, head_dim]; dimension i turns with i + head_dim / 2."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(
    queries: Matrix,
    keys: Matrix,
    values: Matrix,
    start: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Matrix:
    """One sequence, causal, grouped queries.

    Args:
        queries: [rows, num_heads, head_dim] at positions ``start`` and on.
        keys, values: [start + rows, num_kv_heads, head_dim].
        scale: multiplies scores; None: head_dim ** -0.5.
        window: positions that a row sees, its own included; None: all.
        soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap); None: they stay.

    Returns:
        [rows, num_heads, head_dim].
    """
    rows, num_heads, head_dim = queries.shape
    group = num_heads // keys.shape[1]
    at, own = np.arange(len(keys)), (start + np.arange(rows))[:, None]
    hidden = at > own
    if window is not None:
        hidden |= at <= own - window
    output = np.empty_like(queries)
    for head in range(num_heads):
        scores = queries[:, head] @ keys[:, head // group].T
        scores *= head_dim**-0.5 if scale is None else scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        output[:, head] = weights @ values[:, head // group]
    return output
