"""Stored tensor bytes to torch tensors: views where the types agree, conversion elsewhere.

Knows block formats, not files nor models. Called by ``gguf_model`` and ``hf_directory``.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from engine.loaders.gguf_file import BLOCK_SHAPES

Unpack = Callable[[torch.Tensor], torch.Tensor]

_VALUES_PER_PASS = 1 << 22
"""Quantised tensors are converted this many values at a time, so float32 scratch stays small."""

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def to_tensor(
    stored: npt.NDArray[np.uint8], type_name: str, shape: tuple[int, ...], dtype: str
) -> torch.Tensor:
    """A tensor of ``shape`` and ``dtype`` from a tensor's stored bytes.

    Args:
        stored: contiguous bytes, writable as numpy sees it.
        type_name: of ``gguf_file.BLOCK_SHAPES``.
        dtype: name of a torch float type. If it is the stored one, the result is a view.
    """
    wanted: torch.dtype = getattr(torch, dtype)
    if type_name in _PLAIN:
        return _plain(stored, _PLAIN[type_name]).view(shape).to(wanted)
    values, block_bytes = BLOCK_SHAPES[type_name]
    unpack = _QUANTIZED.get(type_name) or _by_library(type_name)
    blocks = torch.from_numpy(stored).view(-1, block_bytes)
    out = torch.empty(len(blocks), values, dtype=wanted)
    step = max(_VALUES_PER_PASS // values, 1)
    for start in range(0, len(blocks), step):
        out[start : start + step] = unpack(blocks[start : start + step])
    return out.view(shape)


def _plain(stored: npt.NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    if stored.ctypes.data % dtype.itemsize:
        # safetensors does not promise alignment.
        stored = stored.copy()
    return torch.from_numpy(stored).view(dtype)


def _unpack_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """``[n, 34]`` bytes (fp16 scale, 32 int8) -> ``[n, 32]`` float32."""
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    return blocks[:, 2:].view(torch.int8).float() * scale


def _unpack_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """``[n, 20]`` bytes (fp16 scale, fp16 minimum, 16 pairs of nibbles) -> ``[n, 32]`` float32.

    Low nibbles are values 0..15, high nibbles 16..31.
    """
    scale, minimum = blocks[:, :4].contiguous().view(torch.float16).float().split(1, dim=1)
    nibbles = blocks[:, 4:]
    return torch.cat([nibbles & 15, nibbles >> 4], dim=1).float() * scale + minimum


def _by_library(type_name: str) -> Unpack:
    """``[n, block bytes]`` -> ``[n, block values]`` float32, for the types that nothing here
    needs fast."""
    import gguf

    kind = gguf.GGMLQuantizationType[type_name]
    return lambda blocks: torch.from_numpy(gguf.dequantize(blocks.numpy(), kind))


_QUANTIZED: dict[str, Unpack] = {"Q8_0": _unpack_q8_0, "Q4_1": _unpack_q4_1}
