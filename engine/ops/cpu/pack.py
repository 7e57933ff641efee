"""Weight matrices to the panels that ``native/panels.h`` describes.

Values are never changed for GGUF blocks: their scales and integers are only moved. Floats become
bfloat16 by rounding, or int8 in groups of 64 with a float32 scale.

Knows matrices, not models. Called by ``native_model`` and by tests.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine.ops.cpu import bindings

PANEL_COLUMNS = 32
INT8_GROUP = 64
GGUF_GROUP = 32
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
T = TypeVar("T", bound=np.generic)

_BLOCK_KINDS = {"Q8_0": bindings.Q8_0, "Q4_0": bindings.Q4_0, "Q4_1": bindings.Q4_1}
_STORED_BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
# A group of 32 inputs in a panel: scales, minima, values of 32 columns.
_GROUP_BYTES = {bindings.Q8_0: 1088, bindings.Q4_0: 576, bindings.Q4_1: 640}
_INT8_GROUP_BYTES = PANEL_COLUMNS * (4 + INT8_GROUP)


@dataclass(frozen=True, slots=True, eq=False)
class RawBlocks:
    """A matrix as GGUF stores it."""

    type_name: str
    """``Q8_0``, ``Q4_0`` or ``Q4_1``."""
    data: Bytes
    """[outputs, bytes of a row]"""

    @property
    def kind(self) -> int:
        return _BLOCK_KINDS[self.type_name]

    @property
    def inputs(self) -> int:
        return self.data.shape[1] // _STORED_BLOCK_BYTES[self.type_name] * GGUF_GROUP

    def take_rows(self, rows: npt.NDArray[np.int64]) -> "RawBlocks":
        """The same matrix with its rows in another order."""
        return RawBlocks(self.type_name, self.data[rows])


def is_packable(type_name: str) -> bool:
    """Whether matrices of this GGUF type are multiplied as they are stored."""
    return type_name in _BLOCK_KINDS


def panel_bytes(kind: int, inputs: int) -> int:
    """Bytes of one panel of 32 outputs."""
    if kind in (bindings.FLOAT32, bindings.BFLOAT16):
        return inputs * PANEL_COLUMNS * (4 if kind == bindings.FLOAT32 else 2)
    if kind == bindings.INT8:
        return inputs // INT8_GROUP * _INT8_GROUP_BYTES
    return inputs // GGUF_GROUP * _GROUP_BYTES[kind]


def packed_bytes(kind: int, outputs: int, inputs: int) -> int:
    """Bytes of a packed matrix; outputs are padded to whole panels."""
    return -(-outputs // PANEL_COLUMNS) * panel_bytes(kind, inputs)


def pack_floats(weight: npt.NDArray[np.generic], kind: int, out: Bytes) -> None:
    """Pack a float matrix.

    Args:
        weight: [outputs, inputs] float32, or bfloat16 as uint16 bits for kind BFLOAT16.
        kind: FLOAT32, BFLOAT16, INT8 or Q8_0 (int8 in groups of 32 with a float16 scale).
        out: ``packed_bytes`` of memory.
    """
    if kind == bindings.BFLOAT16:
        bits = weight if weight.dtype == np.uint16 else to_bfloat16(weight)
        _pack_lanes(bits, out)
    elif kind == bindings.FLOAT32:
        _pack_lanes(np.asarray(weight, np.float32), out)
    elif kind == bindings.INT8:
        scales, values = quantise(np.asarray(weight, np.float32), INT8_GROUP)
        _pack_bytes(scales, values, out)
    else:
        scales, values = quantise(np.asarray(weight, np.float32), GGUF_GROUP)
        _pack_bytes(scales.astype(np.float16), values, out)


def pack_blocks(blocks: RawBlocks, out: Bytes) -> None:
    """Pack a matrix of GGUF blocks as they are."""
    outputs = len(blocks.data)
    stored = blocks.data.reshape(outputs, -1, _STORED_BLOCK_BYTES[blocks.type_name])
    scales = _halves(stored, 0)
    if blocks.type_name == "Q8_0":
        _pack_bytes(scales, stored[..., 2:].view(np.int8), out)
    elif blocks.type_name == "Q4_0":
        _pack_nibbles([scales], stored[..., 2:], out)
    else:
        _pack_nibbles([scales, _halves(stored, 2)], stored[..., 4:], out)


def interleave_gate_up(gate: npt.NDArray[T], up: npt.NDArray[T]) -> npt.NDArray[T]:
    """Rows of both so that every panel holds 16 gate rows and the 16 up rows they multiply."""
    rows, width = gate.shape
    pairs = np.stack([gate.reshape(-1, 16, width), up.reshape(-1, 16, width)], axis=1)
    return pairs.reshape(2 * rows, width)


def to_bfloat16(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def quantise(weight: Floats, group: int) -> tuple[Floats, npt.NDArray[np.int8]]:
    """int8 in groups of inputs, symmetric: scales [outputs, groups], values [.., group]."""
    groups = weight.reshape(len(weight), -1, group)
    scales = np.abs(groups).max(axis=2) / np.float32(127)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    return scales, np.rint(groups * inverse[..., None]).astype(np.int8)


def _halves(stored: Bytes, at: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(stored[..., at : at + 2]).view(np.float16)[..., 0]


def _by_panel(rows: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """[outputs, ...] -> [panels, 32, ...], the last panel filled up with zeros."""
    missing = -len(rows) % PANEL_COLUMNS
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])
    return rows.reshape(-1, PANEL_COLUMNS, *rows.shape[1:])


def _pack_lanes(weight: npt.NDArray[np.generic], out: Bytes) -> None:
    """32-bit lanes [inputs / per lane][32 columns]."""
    lanes = _by_panel(np.ascontiguousarray(weight).view(np.uint32))
    out.view(np.uint32).reshape(len(lanes), -1, PANEL_COLUMNS)[...] = lanes.swapaxes(1, 2)


def _pack_bytes(scales: npt.NDArray[np.generic], values: npt.NDArray[np.int8], out: Bytes) -> None:
    """Groups of [32] scales and quads [group / 4][32][4] of value + 128."""
    blocks = _blocks(scales, out)
    quads = _quads(np.bitwise_xor(values.view(np.uint8), np.uint8(0x80)))
    _put(blocks, [scales], quads)


def _pack_nibbles(floats: list[npt.NDArray[np.float16]], nibbles: Bytes, out: Bytes) -> None:
    """As ``_pack_bytes``. GGUF's own pairing (input i low, i + 16 high) is ours too."""
    _put(_blocks(floats[0], out), list(floats), _quads(nibbles))


def _blocks(scales: npt.NDArray[np.generic], out: Bytes) -> Bytes:
    """``out`` as [panels, groups, bytes of a block]."""
    panels, groups = -(-len(scales) // PANEL_COLUMNS), scales.shape[1]
    return out.reshape(panels, groups, -1)


def _quads(values: Bytes) -> npt.NDArray[np.generic]:
    """[outputs, groups, bytes] -> [panels, groups, quads, 32] of four bytes each."""
    quads = np.ascontiguousarray(values).view(np.uint32)
    return _by_panel(quads).transpose(0, 2, 3, 1)


def _put(
    blocks: Bytes, floats: list[npt.NDArray[np.generic]], quads: npt.NDArray[np.generic]
) -> None:
    at = 0
    for values in floats:
        width = PANEL_COLUMNS * values.itemsize
        blocks[..., at : at + width].view(values.dtype)[...] = _by_panel(values).swapaxes(1, 2)
        at += width
    blocks[..., at:].view(np.uint32).reshape(quads.shape)[...] = quads
