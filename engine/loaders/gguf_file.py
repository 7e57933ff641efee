"""The GGUF container: keys and tensor directory of one file, mapped into memory.

Knows the layout of the file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and
nothing of models. Every length is checked against the bytes that are there before it is used, so
a garbage file costs no more memory than its own size. No torch. Called by ``gguf_model``.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.errors import CorruptModel, UnsupportedModel
from engine.loaders.mapping import map_file

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MAX_ALIGNMENT = 1 << 20

_NAMES_FROM = {
    0: "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1",
    10: "Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S",
    20: "IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M",
    30: "BF16",
    34: "TQ1_0 TQ2_0",
    39: "MXFP4",
}
_TYPE_NAMES = {
    first + index: name
    for first, names in _NAMES_FROM.items()
    for index, name in enumerate(names.split())
}


class BlockShape(NamedTuple):
    """Values in one stored block, and its bytes."""

    values: int
    num_bytes: int


BLOCK_SHAPES: Mapping[str, BlockShape] = {
    "F32": BlockShape(1, 4),
    "F16": BlockShape(1, 2),
    "BF16": BlockShape(1, 2),
    "Q8_0": BlockShape(32, 34),
    "Q4_0": BlockShape(32, 18),
    "Q4_1": BlockShape(32, 20),
    "Q5_0": BlockShape(32, 22),
    "Q5_1": BlockShape(32, 24),
    "IQ4_NL": BlockShape(32, 18),
    "Q2_K": BlockShape(256, 84),
    "Q3_K": BlockShape(256, 110),
    "Q4_K": BlockShape(256, 144),
    "Q5_K": BlockShape(256, 176),
    "Q6_K": BlockShape(256, 210),
    "IQ4_XS": BlockShape(256, 136),
}
"""The tensor types that are read; the others have a name and nothing else here."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor directory."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as numpy and torch have it; the file has it the other way."""
    type_name: str
    offset: int
    """From the start of the file, in bytes."""


@dataclass(frozen=True, slots=True)
class GgufKey:
    """A decoded value and the bytes it was decoded from."""

    value: object
    start: int
    end: int


class GgufFile:
    """Keys and tensor directory of one mapped GGUF file.

    Raises:
        ModelNotFound: the file cannot be read.
        CorruptModel: it is not GGUF, or ends too early, or contradicts itself.
        UnsupportedModel: a GGUF version or byte order that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        reader = _Reader(self._map, path)
        num_tensors, num_keys = reader.header()
        self.keys: dict[str, GgufKey] = {}
        for _ in range(num_keys):
            name, key = reader.key()
            if name in self.keys:
                raise reader.corrupt(f"key {name} appears twice")
            self.keys[name] = key
        directory = [reader.tensor() for _ in range(num_tensors)]
        alignment = self.integer("general.alignment", 32)
        if not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise reader.corrupt(f"general.alignment is {alignment}, not a power of two")
        self._data_start = -(-reader.position // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, type_name, offset in directory:
            if name in self.tensors:
                raise reader.corrupt(f"tensor {name} appears twice")
            if offset % alignment:
                raise reader.corrupt(f"tensor {name} starts at {offset}, not aligned")
            self.tensors[name] = GgufTensor(name, shape, type_name, self._data_start + offset)

    def blocks(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes over the mapping, no copy.

        Raises:
            UnsupportedModel: a tensor type that is not read.
            CorruptModel: the bytes are not all there.
        """
        block = BLOCK_SHAPES.get(tensor.type_name)
        if block is None:
            readable = ", ".join(BLOCK_SHAPES)
            raise UnsupportedModel(
                f"{self.path.name}: tensor {tensor.name} is of type {tensor.type_name}; "
                f"supported are {readable}"
            )
        if tensor.shape[-1] % block.values:
            raise CorruptModel(
                f"{self.path.name}: rows of tensor {tensor.name} are {tensor.shape[-1]} long, "
                f"not a multiple of {block.values} as {tensor.type_name} needs"
            )
        num_bytes = math.prod(tensor.shape) // block.values * block.num_bytes
        missing = tensor.offset + num_bytes - len(self._map)
        if missing > 0:
            raise CorruptModel(
                f"{self.path.name}: truncated, tensor {tensor.name} lacks its last {missing} "
                "bytes; fetch the file again"
            )
        return np.frombuffer(self._map, np.uint8, num_bytes, tensor.offset)

    def key_bytes(self, name: str) -> bytes:
        """The stored bytes of a key's value, for hashing."""
        key = self.keys[name]
        return self._map[key.start : key.end]

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer key. Without ``default`` it must be there."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(name, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(name, "a number")
        if not math.isfinite(value):
            raise self._wrong_type(name, "a finite number")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        """A string key."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong_type(name, "a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean key."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong_type(name, "a boolean")
        return value

    def texts(self, name: str) -> list[str]:
        """An array of strings."""
        value = self._value(name, None)
        if not isinstance(value, list):
            raise self._wrong_type(name, "an array of strings")
        return value

    def numbers(self, name: str) -> npt.NDArray[np.generic]:
        """An array of numbers, as a numpy array over the mapping."""
        value = self._value(name, None)
        if not isinstance(value, np.ndarray):
            raise self._wrong_type(name, "an array of numbers")
        return value

    def _value(self, name: str, default: object) -> object:
        key = self.keys.get(name)
        if key is not None:
            return key.value
        if default is None:
            raise CorruptModel(f"{self.path.name}: key {name} is missing")
        return default

    def _wrong_type(self, name: str, wanted: str) -> CorruptModel:
        return CorruptModel(f"{self.path.name}: key {name} is not {wanted}")


class _Reader:
    """A cursor over the header. Every read checks that the bytes are there."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.position = 0

    def corrupt(self, reason: str) -> CorruptModel:
        return CorruptModel(f"{self._path.name}: {reason}")

    def header(self) -> tuple[int, int]:
        """Number of tensors and of keys."""
        if self._data[:4] != b"GGUF":
            raise self.corrupt("not a GGUF file")
        self.position = 4
        version = self._scalar(_U32)
        if version not in (2, 3):
            kind = "big-endian GGUF" if version >= 1 << 16 else f"GGUF version {version}"
            raise UnsupportedModel(
                f"{self._path.name}: {kind} is not supported; "
                "convert it to little-endian version 2 or 3"
            )
        num_tensors, num_keys = self._scalar(_U64), self._scalar(_U64)
        # A tensor entry is at least 24 bytes long and a key 13.
        self._need(num_tensors * 24 + num_keys * 13)
        return num_tensors, num_keys

    def key(self) -> tuple[str, GgufKey]:
        name = self._string()
        kind = self._scalar(_U32)
        start = self.position
        value = self._array() if kind == _ARRAY else self._single(kind)
        return name, GgufKey(value, start, self.position)

    def tensor(self) -> tuple[str, tuple[int, ...], str, int]:
        """Name, shape, type name, offset in the data section."""
        name = self._string()
        num_dims = self._scalar(_U32)
        if not 1 <= num_dims <= 4:
            raise self.corrupt(f"tensor {name!r:.80} has {num_dims} dimensions")
        shape = tuple(self._scalar(_U64) for _ in range(num_dims))[::-1]
        if 0 in shape:
            raise self.corrupt(f"tensor {name!r:.80} is empty")
        type_id = self._scalar(_U32)
        return name, shape, _TYPE_NAMES.get(type_id, f"number {type_id}"), self._scalar(_U64)

    def _need(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self.position:
            raise self.corrupt("truncated in its header; fetch the file again")

    def _scalar(self, layout: struct.Struct) -> int:
        self._need(layout.size)
        (value,) = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return value

    def _string(self) -> str:
        size = self._scalar(_U64)
        self._need(size)
        start, self.position = self.position, self.position + size
        try:
            return self._data[start : self.position].decode()
        except UnicodeDecodeError:
            raise self.corrupt(f"the string at byte {start} is not UTF-8") from None

    def _single(self, kind: int) -> object:
        if kind == _STRING:
            return self._string()
        layout = _SCALARS.get(kind)
        if layout is None:
            raise self.corrupt(f"unknown value type {kind} at byte {self.position}")
        value = self._scalar(layout)
        # The writer rounded a decimal such as 1e-5 to float32: read back the decimal, which is
        # what config.json of the same model says.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _array(self) -> object:
        kind, count = self._scalar(_U32), self._scalar(_U64)
        if kind == _STRING:
            self._need(count * 8)
            return [self._string() for _ in range(count)]
        layout = _SCALARS.get(kind)
        if layout is None:
            raise self.corrupt(f"unknown array type {kind} at byte {self.position}")
        self._need(count * layout.size)
        dtype = np.dtype(layout.format).newbyteorder("<")
        array = np.frombuffer(self._data, dtype, count, self.position)
        self.position += count * layout.size
        return array
