"""What is shipped, as the compiler sees it: every kernel in every configuration it may run in.

A case is a kernel with the types, constants and alignment of one launch, of a model with 8 KV heads
and 4 query heads on each. Nothing is compiled here. Called by ``benchmarks.kernel_budget``, in a
process without triton's interpreter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.ops.gpu.activation import gated_activation_kernel
from engine.ops.gpu.configs import (
    ACTIVATION,
    COPY,
    HEAD_DIMS,
    LEAST_SPLIT,
    MOST_NORM,
    MOST_NORM_SMALL,
    MOST_SPLITS,
    REDUCE,
    ROTARY,
    WIRE_FORM,
    Chip,
    TileConfig,
    decode_config,
    head_pad,
    norm_config,
    power_of_two,
    prefill_config,
)
from engine.ops.gpu.copy_blocks import copy_blocks_kernel
from engine.ops.gpu.decode_attention import decode_attention_kernel, reduce_splits_kernel
from engine.ops.gpu.kv_format import FP8, INT8, PLAIN
from engine.ops.gpu.norm import rms_norm_kernel
from engine.ops.gpu.prefill_attention import prefill_attention_kernel
from engine.ops.gpu.rotary import rotary_kernel
from engine.ops.gpu.wire_form import move_tokens_kernel

KV_HEADS, GROUP = 8, 4
STORED = {PLAIN: "", INT8: "i8", FP8: "u8"}
FORMAT_NAMES = {PLAIN: "plain", INT8: "int8", FP8: "fp8"}
# Multiples of 16 in a model of whole heads.
STRIDES = (
    *("query_stride", "block_stride", "scale_stride", "x_stride", "gate_up_stride", "head_stride"),
    *("target_stride", "source_stride", "target_scale_stride", "source_scale_stride"),
    *("columns", "words"),
)
NUMBERS = {"scale": "fp32", "soft_cap": "fp32", "eps": "fp32"}


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One kernel as it is launched."""

    name: str
    """kernel/variant"""
    kernel: Any
    pointers: dict[str, str]
    """Argument -> element type, as triton spells it."""
    constants: dict[str, Any]
    config: TileConfig

    @property
    def signature(self) -> dict[str, str]:
        return {name: self._type(name) for name in self.kernel.arg_names}

    @property
    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        """Divisibility by 16 of pointers and strides: without it loads are not vectorised."""
        names = enumerate(self.kernel.arg_names)
        aligned = [i for i, name in names if name in self.pointers or name in STRIDES]
        return {(i,): [["tt.divisibility", 16]] for i in aligned}

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        return f"*{self.pointers[name]}" if name in self.pointers else NUMBERS.get(name, "i32")


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """All of them, for one chip."""
    for variant in _attention_variants():
        yield _prefill(chip, *variant)
        yield _decode(chip, *variant)
    for head_dim in HEAD_DIMS:
        yield _reduce(head_dim)
        for kv_format in FORMAT_NAMES:
            yield _rotary(head_dim, kv_format)
    for columns in (576, MOST_NORM_SMALL, 4096, 8192, MOST_NORM):
        yield _norm(columns)
    yield _activation(False)
    yield _activation(True)
    yield _copy()
    for head_dim in (80, 128, 256):
        for source, target in ((PLAIN, PLAIN), (PLAIN, INT8), (INT8, PLAIN), (PLAIN, FP8)):
            yield _wire(head_dim, source, target)
    yield _wire(128, FP8, PLAIN)
    yield _wire(128, INT8, INT8)


def _attention_variants() -> Iterator[tuple[str, int, int, int, bool]]:
    """element type, head_dim, block_size, format, with a window and a soft cap?"""
    for head_dim in HEAD_DIMS:
        yield "bf16", head_dim, 16, PLAIN, False
        yield "bf16", head_dim, 16, INT8, False
        yield "bf16", head_dim, 16, FP8, False
        yield "bf16", head_dim, 16, PLAIN, True
        yield "fp32", head_dim, 16, PLAIN, False
    for block_size in (32, 64):
        yield "bf16", 128, block_size, PLAIN, False
    yield "fp16", 128, 16, PLAIN, False
    yield "fp16", 128, 16, INT8, False


def _attention_constants(
    config: TileConfig, head_dim: int, block_size: int, kv_format: int, limited: bool
) -> dict[str, Any]:
    return {
        "GROUP": GROUP,
        "KV_HEADS": KV_HEADS,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": head_pad(head_dim),
        "BLOCK_SIZE": block_size,
        "BLOCK_N": config.block_n,
        "FORMAT": kv_format,
        "HAS_SOFT_CAP": limited,
        "HAS_WINDOW": limited,
    }


def _attention_name(
    config: TileConfig, dtype: str, head_dim: int, block_size: int, kv_format: int, limited: bool
) -> str:
    extra = "+window+cap" if limited else ""
    kv = FORMAT_NAMES[kv_format]
    return f"{config.name}: {dtype}, kv {kv}, head {head_dim}, block {block_size}{extra}"


def _prefill(
    chip: Chip, dtype: str, head_dim: int, block_size: int, kv_format: int, limited: bool
) -> CompileCase:
    config = prefill_config(head_dim, 4 if dtype == "fp32" else 2, kv_format != PLAIN, chip)
    constants = _attention_constants(config, head_dim, block_size, kv_format, limited)
    pointers = {
        "output": dtype,
        "queries": dtype,
        "blocks": STORED[kv_format] or dtype,
        "scales": "fp16" if kv_format else dtype,
        "block_tables": "i32",
        "tiles": "i32",
    }
    name = _attention_name(config, dtype, head_dim, block_size, kv_format, limited)
    constants |= {"BLOCK_M": config.block_m}
    return CompileCase(
        f"prefill_attention/{name}", prefill_attention_kernel, pointers, constants, config
    )


def _decode(
    chip: Chip, dtype: str, head_dim: int, block_size: int, kv_format: int, limited: bool
) -> CompileCase:
    config = decode_config(head_dim, 4 if dtype == "fp32" else 2, chip)
    constants = _attention_constants(config, head_dim, block_size, kv_format, limited)
    constants |= {"GROUP_PAD": config.block_m, "LEAST": LEAST_SPLIT, "ONE_SPLIT": limited}
    pointers = {
        "output": dtype,
        "partial": "fp32",
        "partial_log": "fp32",
        "queries": dtype,
        "blocks": STORED[kv_format] or dtype,
        "scales": "fp16" if kv_format else dtype,
        "block_tables": "i32",
        "rows": "i32",
        "contexts": "i32",
    }
    name = _attention_name(config, dtype, head_dim, block_size, kv_format, limited)
    return CompileCase(
        f"decode_attention/{name}", decode_attention_kernel, pointers, constants, config
    )


def _reduce(head_dim: int) -> CompileCase:
    pointers = {"output": "bf16", "partial": "fp32", "partial_log": "fp32", "rows": "i32"}
    constants = {"HEAD_DIM": head_dim, "HEAD_PAD": head_pad(head_dim), "SPLITS": MOST_SPLITS}
    name = f"reduce_splits/bf16, head {head_dim}, splits {MOST_SPLITS}"
    return CompileCase(name, reduce_splits_kernel, pointers, constants, REDUCE)


def _rotary(head_dim: int, kv_format: int) -> CompileCase:
    pointers = {
        "rotated": "bf16",
        "blocks": STORED[kv_format] or "bf16",
        "scales": "fp16" if kv_format else "bf16",
        "heads": "bf16",
        "cosines": "fp32",
        "sines": "fp32",
        "key_rows": "i64",
    }
    constants = {
        "QUERY_HEADS": KV_HEADS * GROUP,
        "KV_HEADS": KV_HEADS,
        "HALF": head_dim // 2,
        "HALF_PAD": power_of_two(head_dim // 2),
        "BLOCK_SIZE": 16,
        "BLOCK_HEADS": ROTARY.block_m,
        "FORMAT": kv_format,
    }
    name = f"rotary/bf16, kv {FORMAT_NAMES[kv_format]}, head {head_dim}"
    return CompileCase(name, rotary_kernel, pointers, constants, ROTARY)


def _norm(columns: int) -> CompileCase:
    config = norm_config(columns)
    pointers = dict.fromkeys(("output", "summed", "x", "residual", "weight"), "bf16")
    constants = {"COLUMNS": columns, "PAD": power_of_two(columns), "HAS_RESIDUAL": True}
    name = f"rms_norm/{config.name}: bf16+residual, columns {columns}"
    return CompileCase(name, rms_norm_kernel, pointers, constants, config)


def _activation(is_gelu: bool) -> CompileCase:
    pointers = {"output": "bf16", "gate_up": "bf16"}
    constants = {"BLOCK": ACTIVATION.block_n, "IS_GELU": is_gelu}
    name = f"gated_activation/bf16, {'gelu' if is_gelu else 'silu'}"
    return CompileCase(name, gated_activation_kernel, pointers, constants, ACTIVATION)


def _copy() -> CompileCase:
    pointers = {"target": "i32", "source": "i32", "target_ids": "i64", "source_ids": "i64"}
    constants = {"BLOCK": COPY.block_n}
    return CompileCase("copy_blocks/any", copy_blocks_kernel, pointers, constants, COPY)


def _wire(head_dim: int, source: int, target: int) -> CompileCase:
    pointers = {
        "target": STORED[target] or "bf16",
        "target_scales": "fp16" if target else "bf16",
        "source": STORED[source] or "bf16",
        "source_scales": "fp16" if source else "bf16",
        "target_slots": "i64",
        "source_slots": "i64",
    }
    constants = {
        "TARGET_SIZE": 1,
        "SOURCE_SIZE": 16,
        "HEADS": KV_HEADS,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": head_pad(head_dim),
        "BLOCK_HEADS": WIRE_FORM.block_m,
        "TARGET": target,
        "SOURCE": source,
    }
    name = f"move_tokens/{FORMAT_NAMES[source]} to {FORMAT_NAMES[target]}, head {head_dim}"
    return CompileCase(name, move_tokens_kernel, pointers, constants, WIRE_FORM)
