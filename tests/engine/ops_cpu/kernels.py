"""The native functions over numpy arrays, one operation at a time."""

import ctypes
from dataclasses import dataclass

import numpy as np

from engine.config import ModelConfig
from engine.kv.cache import PagedKvCache
from engine.ops.cpu import bindings, pack
from engine.ops.cpu.build import library
from engine.ops.cpu.instruction_sets import InstructionSet
from engine.ops.cpu.memory import Arena
from engine.ops.cpu.native_model import cache_struct, layers_with_rope

GGUF_TYPES = {bindings.Q8_0: "Q8_0", bindings.Q4_0: "Q4_0", bindings.Q4_1: "Q4_1"}


@dataclass(frozen=True)
class PackedMatrix:
    """A packed weight and what its stored values are."""

    struct: bindings.Linear
    values: np.ndarray
    """[outputs, inputs] float64, exact."""
    keep: object


class Kernels:
    """One build with one context."""

    def __init__(self, instruction_set: InstructionSet, threads: int) -> None:
        self.native = bindings.load(library(instruction_set))
        self.context = self.native.kvr_context_new(threads)

    def close(self) -> None:
        self.native.kvr_context_free(self.context)

    def linear(self, matrix: PackedMatrix, x: np.ndarray, add_to: np.ndarray | None = None):
        y = np.full((len(x), matrix.struct.outputs), np.nan, np.float32)
        if add_to is not None:
            y[...] = add_to
        status = self.native.kvr_linear(
            self.context,
            ctypes.addressof(matrix.struct),
            x.ctypes.data,
            len(x),
            int(add_to is not None),
            y.ctypes.data,
        )
        assert status == 0
        return y

    def gated_mlp(
        self, gate_up: PackedMatrix, down: PackedMatrix, activation: str, x: np.ndarray
    ) -> np.ndarray:
        y = np.full((len(x), down.struct.outputs), np.nan, np.float32)
        status = self.native.kvr_gated_mlp(
            self.context,
            ctypes.addressof(gate_up.struct),
            ctypes.addressof(down.struct),
            bindings.ACTIVATIONS[activation],
            x.ctypes.data,
            len(x),
            y.ctypes.data,
        )
        assert status == 0
        return y

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        y = np.full_like(x, np.nan)
        self.native.kvr_rms_norm(x.ctypes.data, weight.ctypes.data, *x.shape, eps, y.ctypes.data)
        return y

    def attention(
        self,
        config: ModelConfig,
        cache: PagedKvCache,
        layer: int,
        sequences: list[tuple[int, int, np.ndarray]],
        qkv: np.ndarray,
    ) -> np.ndarray:
        """``sequences``: (start, rows, block table int32) each."""
        bare = (bindings.Layer * config.num_layers)()
        for i, one in enumerate(bare):
            one.window = config.window(i) or 0
        tables: list[np.ndarray] = []
        layers = layers_with_rope(config, bare, config.max_positions, tables)
        scale = config.attention_scale
        model = bindings.Model(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            layers=ctypes.addressof(layers),
            attention_scale=config.head_dim**-0.5 if scale is None else scale,
            attention_soft_cap=config.attention_soft_cap or 0.0,
        )
        parts = (bindings.Sequence * len(sequences))()
        for part, (start, rows, table) in zip(parts, sequences, strict=True):
            part.num_rows, part.start, part.block_table = rows, start, table.ctypes.data
        step = bindings.Step(
            sequences=ctypes.addressof(parts), num_rows=len(qkv), num_sequences=len(sequences)
        )
        native_cache, keep = cache_struct(cache)
        y = np.full((len(qkv), config.num_heads * config.head_dim), np.nan, np.float32)
        status = self.native.kvr_attention(
            self.context,
            ctypes.addressof(model),
            ctypes.addressof(native_cache),
            layer,
            ctypes.addressof(step),
            qkv.ctypes.data,
            y.ctypes.data,
        )
        assert status == 0 and keep is not None
        return y


def packed(weight: np.ndarray, kind: int, bias: np.ndarray | None = None) -> PackedMatrix:
    """A float matrix packed as ``kind``, GGUF kinds through GGUF's own quantiser."""
    outputs, inputs = weight.shape
    out = Arena(pack.packed_bytes(kind, outputs, inputs)).take(
        pack.packed_bytes(kind, outputs, inputs)
    )
    if kind in GGUF_TYPES:
        values = _pack_gguf(weight, kind, out)
    else:
        pack.pack_floats(weight, kind, out)
        values = stored_values(weight, kind)
    address = None if bias is None else bias.ctypes.data
    struct = bindings.Linear(out.ctypes.data, address, outputs, inputs, kind)
    return PackedMatrix(struct, values, (out, bias))


def stored_values(weight: np.ndarray, kind: int) -> np.ndarray:
    """What of a float matrix survives packing."""
    if kind == bindings.BFLOAT16:
        bits = pack.to_bfloat16(weight).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    if kind == bindings.INT8:
        scales, values = pack.quantise(weight, pack.INT8_GROUP)
        return (values * scales.astype(np.float64)[..., None]).reshape(weight.shape)
    return weight.astype(np.float64)


def _pack_gguf(weight: np.ndarray, kind: int, out: np.ndarray) -> np.ndarray:
    import gguf

    quantization = gguf.GGMLQuantizationType[GGUF_TYPES[kind]]
    data = gguf.quantize(weight, quantization).reshape(len(weight), -1)
    pack.pack_blocks(pack.RawBlocks(GGUF_TYPES[kind], data), out)
    return gguf.dequantize(data, quantization).reshape(weight.shape).astype(np.float64)
