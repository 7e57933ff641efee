"""The safetensors container: tensor directory of one file, mapped into memory.

Knows the layout of the file (https://github.com/huggingface/safetensors#format) and nothing of
models. No torch. Called by ``hf_directory``.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.errors import CorruptModel, UnsupportedModel
from engine.loaders.mapping import map_file

_VALUE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """One entry of the directory."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int
    """From the start of the file, in bytes."""
    end: int


class SafetensorsFile:
    """Tensor directory of one mapped file.

    Raises:
        ModelNotFound: the file cannot be read.
        CorruptModel: it is not safetensors, or ends too early, or contradicts itself.
        UnsupportedModel: a tensor of a type that is not read.
    """

    def __init__(self, path: Path) -> None:
        self._map = map_file(path)
        self._name = path.name
        size = len(self._map)
        header_bytes = int.from_bytes(self._map[:8], "little")
        if size < 8 or header_bytes > size - 8:
            raise self._corrupt("not a safetensors file, or truncated; fetch the file again")
        if header_bytes > _MAX_HEADER_BYTES:
            raise self._corrupt(f"its header claims {header_bytes} bytes")
        try:
            header = json.loads(self._map[8 : 8 + header_bytes])
        except (ValueError, RecursionError):
            raise self._corrupt("its header is not JSON") from None
        if not isinstance(header, dict):
            raise self._corrupt("its header is not a JSON object")
        header.pop("__metadata__", None)
        self.tensors = {
            name: self._entry(name, value, 8 + header_bytes) for name, value in header.items()
        }

    def stored(self, tensor: SafeTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes over the mapping, no copy."""
        return np.frombuffer(self._map, np.uint8, tensor.end - tensor.start, tensor.start)

    def _entry(self, name: str, value: object, data_start: int) -> SafeTensor:
        match value:
            case {"dtype": str(type_name), "shape": list(shape), "data_offsets": [start, end]}:
                numbers = [*shape, start, end]
            case _:
                raise self._corrupt(f"the entry of tensor {name!r:.80} is malformed")
        if len(shape) > _MAX_DIMS or not all(
            isinstance(number, int) and not isinstance(number, bool) and number >= 0
            for number in numbers
        ):
            raise self._corrupt(f"the entry of tensor {name!r:.80} is malformed")
        if type_name not in _VALUE_BYTES:
            raise UnsupportedModel(
                f"{self._name}: tensor {name:.80} is of type {type_name:.20}; "
                f"supported are {', '.join(_VALUE_BYTES)}"
            )
        if end - start != math.prod(shape) * _VALUE_BYTES[type_name] or end == start:
            raise self._corrupt(f"tensor {name:.80} has {end - start} bytes for shape {shape}")
        if data_start + end > len(self._map):
            raise self._corrupt(f"truncated, tensor {name:.80} is cut off; fetch the file again")
        return SafeTensor(name, tuple(shape), type_name, data_start + start, data_start + end)

    def _corrupt(self, reason: str) -> CorruptModel:
        return CorruptModel(f"{self._name}: {reason}")
