"""Rotary frequencies of a model, stretched as it says, and the angles of positions.

Frequencies never depend on how long a sequence is: what is in the KV cache stays valid as it
grows. Knows configurations, not kernels. Called by the torch model and ``cpu.native_model``.
"""

import math

import torch
from torch import Tensor

from engine.config import ModelConfig, RopeScaling


class Rope:
    """The rotary embedding of some of a model's layers.

    Args:
        is_local: of the layers that have ``local_rope_theta``.
    """

    def __init__(self, config: ModelConfig, is_local: bool = False) -> None:
        theta = config.rope_theta
        if is_local and config.local_rope_theta is not None:
            theta = config.local_rope_theta
        scaling = None if is_local else config.rope_scaling
        if scaling is not None and scaling.kind == "dynamic":
            theta *= _dynamic(scaling, config)
            scaling = None
        even = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        plain = 1.0 / theta ** (even / config.head_dim)
        self._scale = scaling.attention_factor if scaling else 1.0
        self.inverse_frequencies = _stretched(plain, theta, scaling) if scaling else plain
        """float32 ``[head_dim / 2]``"""

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of ``[rows]`` positions: float32 ``[rows, head_dim / 2]`` each."""
        angles = positions.float().unsqueeze(1) * self.inverse_frequencies
        cosines, sines = angles.cos(), angles.sin()
        return (
            (cosines, sines) if self._scale == 1.0 else (cosines * self._scale, sines * self._scale)
        )


def _dynamic(scaling: RopeScaling, config: ModelConfig) -> float:
    """By what the base grows for the model's longest context (NTK-aware scaling)."""
    ratio = max(1.0, config.max_positions / scaling.original_positions)
    grown: float = (scaling.factor * ratio - (scaling.factor - 1)) ** (
        config.head_dim / (config.head_dim - 2)
    )
    return grown


def _stretched(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    match scaling.kind:
        case "linear":
            return plain / scaling.factor
        case "divisors":
            return plain / torch.tensor(scaling.divisors, dtype=torch.float32)
        case "llama3":
            turns = scaling.original_positions * plain / (2 * math.pi)
            kept = (turns - scaling.slow) / (scaling.fast - scaling.slow)
        case "yarn":
            kept = 1 - _ramp(len(plain), theta, scaling)
        case _:
            raise ValueError(f"rope scaling {scaling.kind}")
    kept = kept.clamp(0, 1)
    return plain * kept + plain / scaling.factor * (1 - kept)


def _ramp(count: int, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN's: below 0 where a frequency is kept, above 1 where it is stretched wholly."""

    def dimension(turns: float) -> float:
        """Which pair turns this often within the original context."""
        wavelength = scaling.original_positions / (turns * 2 * math.pi)
        return count * math.log(wavelength) / math.log(theta)

    low, high = dimension(scaling.fast), dimension(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    # Equal ends make a step, as the paper's authors have it.
    return (torch.arange(count, dtype=torch.float32) - low) / (high - low or 0.001)
