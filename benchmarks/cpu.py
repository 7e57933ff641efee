"""The engine on one thread against the machine's limits: ``python -m benchmarks.cpu [MODEL]``.

Limits are measured in the same run: multiply-adds of a large bfloat16 matmul, bytes of a sum over
huge pages. Prefill counts every operation, attention included; decode counts every
byte of weights and KV. KV is filled first: untouched pages are one page of zeros and flatter.
Prints Markdown. Use a quiet machine and pin it: ``OMP_NUM_THREADS=1 taskset -c 0``.
"""

import argparse
import functools
import time
from collections.abc import Callable

import numpy as np
import torch

from engine.config import EngineConfig, ModelConfig
from engine.kv.cache import PagedKvCache
from engine.loaders.open import open_model
from engine.models.choose import choose
from engine.models.on_native import FileWeights
from engine.ops.cpu.memory import Arena
from engine.ops.cpu.native_model import NativeLlama, SequenceRows
from engine.ops.cpu.weights import PackedWeights

PREFILL_TOKENS = (128, 512, 1900)
DECODE_BATCHES = (1, 8, 16, 32)
DECODE_CONTEXTS = (128, 150, 1024, 4096)
BLOCK_SIZE = 16
ROUNDS = 5
MATMUL_SIZES = (1024, 2048, 4096)
READ_BYTES = 1 << 29


def best_s(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The shortest of several runs: what the machine can do when nobody else wants it."""
    work()
    times = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return min(times)


def matmul_flops() -> float:
    """Floating-point operations a second of a large bfloat16 matmul."""
    rates = []
    for size in MATMUL_SIZES:
        a, b = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
        rates.append(2 * size**3 / best_s(functools.partial(torch.matmul, a, b)))
    return max(rates)


def read_bandwidth() -> float:
    """Bytes a second that a sum over huge pages reads."""
    memory = Arena(READ_BYTES).take(READ_BYTES)
    memory[:] = 1
    numbers = torch.from_numpy(memory).view(torch.float32)
    return READ_BYTES / best_s(numbers.sum)


def layer_params(config: ModelConfig) -> int:
    """Weights of all layers' matrices."""
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * queries + 2 * keys)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def prefill_flops(config: ModelConfig, num_tokens: int) -> float:
    """All layers for every token, causal attention, the head for the last token."""
    scores = num_tokens * (num_tokens + 1) // 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * scores
    head = 2 * config.vocab_size * config.hidden_size
    return 2.0 * layer_params(config) * num_tokens + attention + head


class Bench:
    """One model in one recipe."""

    def __init__(self, model: str, weights: str, kv_dtype: str) -> None:
        files = open_model(model)
        config = EngineConfig(weights=weights, kv_dtype=kv_dtype, block_size=BLOCK_SIZE)
        choice = choose(config, files)
        self.config = files.config
        self.layout = choice.layout
        self.native = NativeLlama(
            files.config, PackedWeights(files.config, FileWeights(files), weights)
        )
        most = max(b * (c + 1) for b in DECODE_BATCHES for c in DECODE_CONTEXTS)
        blocks = most // BLOCK_SIZE + max(DECODE_BATCHES)
        self.cache = PagedKvCache(self.layout, blocks)
        self.cache.fill(0x3C)  # small numbers in every dtype

    def prefill_s(self, num_tokens: int) -> float:
        ids = np.arange(100, 100 + num_tokens, dtype=np.int32)
        rows = [SequenceRows(0, num_tokens, self._table(0, num_tokens))]
        return best_s(lambda: self.native.forward(ids, rows, [num_tokens - 1], self.cache))

    def decode_s(self, batch: int, context: int) -> float:
        ids = np.arange(100, 100 + batch, dtype=np.int32)
        rows = [SequenceRows(context, 1, self._table(i, context + 1)) for i in range(batch)]
        return best_s(lambda: self.native.forward(ids, rows, range(batch), self.cache), 20)

    def decode_bytes(self, batch: int, context: int) -> float:
        kv = self.layout.block_bytes / BLOCK_SIZE * context * batch
        return self.native.weights.num_bytes + kv

    def _table(self, number: int, num_tokens: int) -> np.ndarray:
        """Consecutive blocks, another run of them for every sequence."""
        count = self.layout.num_blocks_for(num_tokens)
        return np.arange(number * count, (number + 1) * count, dtype=np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--kv-dtype", default="auto", help="auto or int8")
    parser.add_argument("--weights", nargs="+", default=["bf16", "file", "int8"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    flops, bandwidth = matmul_flops(), read_bandwidth()
    print(f"bfloat16 matmul {flops / 1e9:.0f} GFLOP/s, memory read {bandwidth / 1e9:.1f} GB/s\n")
    benches = {w: Bench(options.model, w, options.kv_dtype) for w in options.weights}
    print("| weights | prefill tokens | tokens/s | of the bf16 matmul rate |\n| - | - | - | - |")
    for num_tokens in PREFILL_TOKENS:
        for weights, bench in benches.items():
            elapsed_s = bench.prefill_s(num_tokens)
            share = prefill_flops(bench.config, num_tokens) / elapsed_s / flops
            rate = num_tokens / elapsed_s
            print(f"| {weights} | {num_tokens} | {rate:.0f} | {share:.0%} |")
    print("\n| weights | batch | context | tokens/s | of the memory limit |\n| - | - | - | - | - |")
    for context in DECODE_CONTEXTS:
        for batch in DECODE_BATCHES:
            for weights, bench in benches.items():
                elapsed_s = bench.decode_s(batch, context)
                share = bench.decode_bytes(batch, context) / elapsed_s / bandwidth
                rate = batch / elapsed_s
                print(f"| {weights} | {batch} | {context} | {rate:.0f} | {share:.0%} |")


if __name__ == "__main__":
    main()
