"""What the GPU kernels should reach on an H100 and an H200, said before they have run on one.

``python -m benchmarks.kernel_predictions`` renews the generated parts of ``docs/gpu_kernels.md``:
predictions from the bytes and operations of ``engine.ops.gpu.traffic``, and a summary of the budget
that ``benchmarks.kernel_budget`` compiled. Needs neither triton nor a GPU. Measurements are to be
held against these numbers, which is why a prediction is not changed once there is one.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kernel_budget import BUDGET
from engine.ops.gpu import traffic
from engine.ops.gpu.configs import (
    CHIPS,
    LEAST_SPLIT,
    choose_num_splits,
    decode_config,
    prefill_config,
)
from engine.ops.gpu.traffic import Heads, Traffic

DOCUMENT = Path(__file__).parent.parent / "docs" / "gpu_kernels.md"
HOPPER = CHIPS["sm_90"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peaks by the vendor's data sheet, of the SXM part."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    """bfloat16, dense."""


GPUS = (Gpu("H100", 3.35e12, 989e12), Gpu("H200", 4.8e12, 989e12))
LAUNCH_S = 3e-6
"""What a kernel takes that does nothing."""
# Shares of a peak that such kernels reach where nothing else is in their way. Decode and the
# element-wise kernels: what good copies reach. Prefill: pointers, not descriptors, and no
# specialised warps; FlashAttention 3 reaches 0.7 of this peak, FlashAttention 2 about 0.4.
MEMORY_SHARE = 0.8
TENSOR_SHARE = 0.4

LLAMA_8B = Heads(num_heads=32, num_kv_heads=8, head_dim=128)
LLAMA_8B_INT8 = Heads(32, 8, 128, kv_bytes=1, scale_bytes=2)
WIRE = Heads(32, 8, 128)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One launch on one GPU."""

    roofline_s: float
    """The bytes that must move, or the operations, at the peak: no kernel is faster."""
    is_compute: bool
    """Operations set the roofline."""
    expected_s: float
    """What is expected of ours."""


def predict(work: Traffic, gpu: Gpu, launches: int = 1) -> Prediction:
    """Asked-for bytes count for the expectation where they are not a cache's to serve."""
    memory, compute = work.needed / gpu.bytes_per_s, work.flops / gpu.flops_per_s
    is_compute = compute > memory
    # Where operations set the pace, contexts that tiles read again come from the cache.
    moved = work.needed if is_compute else work.moved
    slowest = max(
        moved / gpu.bytes_per_s / MEMORY_SHARE, work.flops / gpu.flops_per_s / TENSOR_SHARE
    )
    return Prediction(max(memory, compute), is_compute, slowest + launches * LAUNCH_S)


def decode(batch: int, context: int, heads: Heads) -> Traffic:
    """A batch of equal contexts."""
    num_splits = choose_num_splits(batch, heads.num_kv_heads, HOPPER)
    block_n = decode_config(heads.head_dim, heads.element_bytes, HOPPER).block_n
    share = max(-(-context // num_splits), LEAST_SPLIT)
    length = -(-share // block_n) * block_n
    used = -(-context // length)
    return traffic.decode_attention([context] * batch, heads, num_splits, [used] * batch)


def prefill(num_tokens: int, heads: Heads) -> Traffic:
    """One prompt, whole."""
    is_quantised = heads.scale_bytes > 0
    config = prefill_config(heads.head_dim, heads.element_bytes, is_quantised, HOPPER)
    tokens = config.block_m // (heads.num_heads // heads.num_kv_heads)
    return traffic.prefill_attention([(0, num_tokens)], heads, tokens)


def works() -> Iterator[tuple[str, Traffic, int]]:
    """(what, its traffic, its launches), in the order of the document."""
    for num_tokens in (512, 2048, 8192, 32768):
        yield f"prefill attention, {num_tokens} tokens", prefill(num_tokens, LLAMA_8B), 1
    for num_tokens in (2048, 32768):
        yield (
            f"prefill attention, {num_tokens} tokens, int8 KV",
            prefill(num_tokens, LLAMA_8B_INT8),
            1,
        )
    for batch, context in ((1, 1024), (1, 32768), (16, 8192), (64, 8192), (256, 1024)):
        # One split needs no reduction.
        launches = 2 if choose_num_splits(batch, LLAMA_8B.num_kv_heads, HOPPER) > 1 else 1
        work = decode(batch, context, LLAMA_8B)
        yield f"decode attention, batch {batch}, context {context}", work, launches
    work = decode(64, 8192, LLAMA_8B_INT8)
    yield "decode attention, batch 64, context 8192, int8 KV", work, 1
    for rows in (64, 8192):
        yield f"rotary + KV write, {rows} rows", traffic.rotate_and_store(rows, LLAMA_8B), 1
        yield f"residual + RMS norm, {rows} rows", traffic.rms_norm(rows, 4096, 2, True), 1
        yield f"SiLU-mul, {rows} rows", traffic.gated_activation(rows, 14336, 2), 1
        yield f"GELU-mul, {rows} rows", traffic.gated_activation(rows, 14336, 2), 1
    region_bytes = 16 * LLAMA_8B.token_bytes
    yield "block copy, 512 blocks of 16", traffic.copy_blocks(512, region_bytes), 1
    yield "pack, 8192 tokens", traffic.move_tokens(8192, LLAMA_8B, WIRE), 1
    yield "pack to int8, 8192 tokens", traffic.move_tokens(8192, LLAMA_8B, LLAMA_8B_INT8), 1


def prediction_table() -> str:
    """Markdown."""
    names = "".join(f" {gpu.name}: roofline | expected |" for gpu in GPUS)
    lines = [
        "| one layer of Llama 8B | must move, MB | moves, MB | GFLOP | bound by |" + names,
        "| --- |" + " ---: |" * 3 + " --- |" + " ---: |" * (2 * len(GPUS)),
    ]
    for what, work, launches in works():
        predicted = [predict(work, gpu, launches) for gpu in GPUS]
        bound = "tensor cores" if predicted[0].is_compute else "memory"
        times = "".join(
            f" {one.roofline_s * 1e6:,.1f} µs | {one.expected_s * 1e6:,.1f} µs |"
            for one in predicted
        )
        lines.append(
            f"| {what} | {work.needed / 1e6:,.1f} | {work.moved / 1e6:,.1f} "
            f"| {work.flops / 1e9:,.1f} | {bound} |{times}"
        )
    return "\n".join(lines)


def budget_table() -> str:
    """Markdown: of each kernel and chip, the extremes over its configurations."""
    budget = json.loads(BUDGET.read_text("utf-8"))
    lines = [
        f"Made by triton {budget['triton']}. Each cell: least to most over the cases.",
        "",
        "| kernel | chip | cases | registers | spills | shared memory, KB | occupancy |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    kernels = sorted({name.partition("/")[0] for name in budget["uses"]["sm_90"]})
    for kernel in kernels:
        for chip, uses in budget["uses"].items():
            rows = [use for name, use in uses.items() if name.partition("/")[0] == kernel]
            shared = _span([row["shared_bytes"] / 1024 for row in rows], "{:.0f}")
            cells = (
                kernel, chip, len(rows), _span([row["registers"] for row in rows]),
                max(row["spill_bytes"] for row in rows), shared,
                _span([100 * row["occupancy"] for row in rows], "{:.0f} %"),
            )  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _span(numbers: list[float], form: str = "{}") -> str:
    least, most = form.format(min(numbers)), form.format(max(numbers))
    return least if least == most else f"{least} to {most}"


def renewed(document: str) -> str:
    """The document with its generated parts as they are now."""
    for name, made in (("predictions", prediction_table()), ("budget", budget_table())):
        before, found, rest = document.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"\n<!-- end of {name} -->")
        assert found and end, f"{DOCUMENT}: no place for {name}"
        document = before + found + made + end + after
    return document


def main() -> int:
    DOCUMENT.write_text(renewed(DOCUMENT.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
