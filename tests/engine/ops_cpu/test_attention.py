"""Rotation, KV write and paged attention against their definitions, in both KV orders.

Mixed batches of chunks and decode rows over shuffled blocks, with earlier tokens in the cache;
head sizes, groups and lengths around every boundary of the kernels.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from engine.config import ModelConfig
from engine.kv.cache import PagedKvCache
from engine.ops.cpu import kv_order, reference
from engine.ops.cpu.native_model import NativeLlama
from tests.engine.ops_cpu.kernels import Kernels

DTYPES = ("float32", "bfloat16", "int8")
LAYER, NUM_LAYERS, NUM_BLOCKS = 1, 2, 64


@dataclass
class Sequence:
    """Tokens computed step by step; keeps what went in, unrotated."""

    table: np.ndarray
    length: int = 0

    def __post_init__(self) -> None:
        self.qkv: list[np.ndarray] = []


class Bench:
    """A cache, sequences in it, and the same in float64 beside it."""

    def __init__(
        self, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int = 16
    ) -> None:
        self.config = ModelConfig(
            family="llama",
            vocab_size=32,
            hidden_size=32,
            intermediate_size=32,
            num_layers=NUM_LAYERS,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_positions=1024,
            rope_theta=10000.0,
            rms_norm_eps=1e-5,
            tied_head=True,
            bos_token_id=None,
            eos_token_ids=(),
        )
        self.dtype = dtype
        layout = NativeLlama.kv_layout(self.config, dtype, block_size)
        self.cache = PagedKvCache(layout, NUM_BLOCKS)
        self.cache.fill(0xFF)  # NaN, and NaN scales: what was never written must never matter
        self._random = np.random.default_rng(num_heads * head_dim)
        self._free = list(self._random.permutation(NUM_BLOCKS).astype(np.int32))

    def sequence(self, num_tokens: int) -> Sequence:
        count = self.cache.layout.num_blocks_for(num_tokens)
        table, self._free = self._free[:count], self._free[count:]
        return Sequence(np.array(table, np.int32))

    def step(self, kernels: Kernels, parts: list[tuple[Sequence, int]]) -> np.ndarray:
        """Compute ``rows`` more tokens of every sequence; returns attention's output."""
        config = self.config
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        rows = []
        for sequence, count in parts:
            rows.append(self._random.standard_normal((count, width)).astype(np.float32))
            sequence.qkv.append(rows[-1])
        spans = [(s.length, count, s.table) for s, count in parts]
        y = kernels.attention(config, self.cache, LAYER, spans, np.concatenate(rows))
        for sequence, count in parts:
            sequence.length += count
        return y

    def expected(self, sequence: Sequence, rows: int) -> np.ndarray:
        """Of the sequence's last ``rows`` tokens: [rows, num_heads * head_dim]."""
        queries, keys, values = self.parts(sequence)
        start = sequence.length - rows
        out = reference.attention(
            queries[start:],
            keys,
            values,
            start,
            scale=self.config.attention_scale,
            window=self.config.window(LAYER),
            soft_cap=self.config.attention_soft_cap,
        )
        return out.reshape(rows, -1)

    def parts(self, sequence: Sequence) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, keys and values of all tokens, rotated, as the cache's type holds them."""
        config, heads, kv = self.config, self.config.num_heads, self.config.num_kv_heads
        qkv = np.concatenate(sequence.qkv).reshape(sequence.length, -1, config.head_dim)
        at = np.arange(sequence.length)
        rotated = reference.rotary(qkv[:, : heads + kv].astype(float), at, config.rope_theta)
        queries, keys, values = rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv :]
        if self.dtype != "float32":
            # Queries are scaled before they are rounded.
            scale = np.log2(np.e) * (config.attention_scale or config.head_dim**-0.5)
            queries = reference.bfloat16(queries * scale) / scale
            rounded = reference.bfloat16 if self.dtype == "bfloat16" else reference.int8_heads
            keys, values = rounded(keys), rounded(values)
        return queries.astype(float), keys.astype(float), values.astype(float)

    @property
    def tolerance(self) -> float:
        """Relative to the largest value: weights are rounded to 2^-9, and an angle's float32
        cosine may round a key to the other neighbour."""
        return 2e-5 if self.dtype == "float32" else 2**-7

    def assert_close(self, y: np.ndarray, sequence: Sequence, rows: int) -> None:
        expected = self.expected(sequence, rows)
        assert np.abs(y - expected).max() <= self.tolerance * np.abs(expected).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 256, 257, 300])
def test_a_whole_prompt_then_decode(kernels: Kernels, dtype: str, length: int) -> None:
    bench = Bench(dtype, 6, 2, 32)
    sequence = bench.sequence(length + 2)

    bench.assert_close(bench.step(kernels, [(sequence, length)]), sequence, length)
    for _ in range(2):
        bench.assert_close(bench.step(kernels, [(sequence, 1)]), sequence, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128])
def test_head_sizes_and_groups(kernels: Kernels, dtype: str, group: int, head_dim: int) -> None:
    bench = Bench(dtype, 2 * group, 2, head_dim)
    sequence = bench.sequence(60)

    bench.assert_close(bench.step(kernels, [(sequence, 37)]), sequence, 37)
    bench.assert_close(bench.step(kernels, [(sequence, 1)]), sequence, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads,num_kv_heads,head_dim", [(1, 1, 256), (40, 1, 16)])
def test_largest_head_and_group(
    kernels: Kernels, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    bench = Bench(dtype, num_heads, num_kv_heads, head_dim)
    sequence = bench.sequence(40)

    bench.assert_close(bench.step(kernels, [(sequence, 21)]), sequence, 21)
    bench.assert_close(bench.step(kernels, [(sequence, 1)]), sequence, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_mixed_batches(kernels: Kernels, dtype: str, block_size: int) -> None:
    """Chunks with earlier tokens beside decode rows, in one call, block sizes of several pages."""
    bench = Bench(dtype, 9, 3, 64, block_size)
    long, short, fresh = (bench.sequence(n) for n in (200, 40, 97))
    bench.step(kernels, [(long, 97), (short, 17)])

    counts = [(short, 1), (long, 13), (fresh, 97)]
    y = bench.step(kernels, counts)

    row = 0
    for sequence, count in counts:
        bench.assert_close(y[row : row + count], sequence, count)
        row += count
    assert row == len(y)


RULES = {
    "plain": {},
    "window": {"windows": (None, 20)},
    "scale": {"attention_scale": 0.05},
    "cap": {"attention_soft_cap": 1.5, "attention_scale": 0.5},
    "all": {"windows": (7, 260), "attention_soft_cap": 20.0, "attention_scale": 0.4},
}
by_rules = pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 24, 255, 256, 257, 299, 300, 1000])
def test_windows(kernels: Kernels, dtype: str, window: int) -> None:
    """Across chunks, beginning anywhere in one; another layer's window does not matter."""
    bench = Bench(dtype, 6, 2, 32)
    bench.config = replace(bench.config, windows=(3, window))
    sequence, other = bench.sequence(640), bench.sequence(20)

    bench.assert_close(bench.step(kernels, [(sequence, 600)]), sequence, 600)
    y = bench.step(kernels, [(sequence, 33), (other, 17)])
    bench.assert_close(y[:33], sequence, 33)
    bench.assert_close(y[33:], other, 17)
    bench.assert_close(bench.step(kernels, [(sequence, 1)]), sequence, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@by_rules
def test_scales_and_soft_caps(kernels: Kernels, dtype: str, rules: dict[str, object]) -> None:
    bench = Bench(dtype, 4, 1, 256)
    bench.config = replace(bench.config, **rules)
    sequence = bench.sequence(310)

    bench.assert_close(bench.step(kernels, [(sequence, 300)]), sequence, 300)
    bench.assert_close(bench.step(kernels, [(sequence, 1)]), sequence, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@by_rules
def test_a_row_does_not_depend_on_how_it_was_batched(
    kernels: Kernels, dtype: str, rules: dict[str, object]
) -> None:
    """Whole, in chunks, token by token: bit for bit the same."""
    outputs = []
    for counts in ([300], [64, 64, 64, 64, 44], [299, 1], [7, 1, 1, 250, 41]):
        bench = Bench(dtype, 6, 2, 32)
        bench.config = replace(bench.config, **rules)
        sequence, other = bench.sequence(300), bench.sequence(300)
        qkv = np.random.default_rng(5).standard_normal((300, 320)).astype(np.float32)
        rows, at = [], 0
        for count in counts:
            spans = [(at, count, sequence.table), (0, 1, other.table)]
            together = np.concatenate([qkv[at : at + count], qkv[:1]])
            y = kernels.attention(bench.config, bench.cache, LAYER, spans, together)
            rows.append(y[:count])
            at += count
        outputs.append(np.concatenate(rows))

    for output in outputs[1:]:
        assert (output == outputs[0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(kernels: Kernels, instruction_set, dtype: str) -> None:
    many = Kernels(instruction_set, threads=3)
    try:
        outputs = []
        for one in (kernels, many):
            bench = Bench(dtype, 6, 2, 32)
            first, second = bench.sequence(150), bench.sequence(30)
            outputs.append(bench.step(one, [(first, 130), (second, 20)]))
            outputs.append(bench.step(one, [(first, 1), (second, 1)]))
    finally:
        many.close()

    assert (outputs[0] == outputs[2]).all() and (outputs[1] == outputs[3]).all()


@pytest.mark.parametrize("block_size", [16, 32])
def test_dot_order_is_what_kv_order_says(kernels: Kernels, block_size: int) -> None:
    bench = Bench("bfloat16", 4, 2, 32, block_size)
    sequence = bench.sequence(50)
    bench.step(kernels, [(sequence, 50)])
    layout = bench.cache.layout
    stored = bench.cache.layers[LAYER].view(torch.int16).numpy().view(np.uint16)

    rows = kv_order.rows_from_dot16(stored.reshape(NUM_BLOCKS, -1), layout)

    _, keys, values = bench.parts(sequence)
    mine = rows[sequence.table].swapaxes(0, 1).reshape(2, -1, 2, 32)[:, :50]
    as_floats = (mine.astype(np.uint32) << 16).view(np.float32)
    assert (as_floats[1] == values).all()
    assert np.abs(as_floats[0] - keys).max() <= 2**-7 * np.abs(keys).max()
    back = kv_order.dot16_from_rows(rows, layout)
    assert (back == stored.reshape(NUM_BLOCKS, -1)).all()


@pytest.mark.parametrize("size", [0.0, 1e-9, 3e-6, 1.0, 1e5, 1e9])
def test_int8_holds_any_size(kernels: Kernels, size: float) -> None:
    """Below and above what a float16 scale can say, too: no wrap, no NaN."""
    bench = Bench("int8", 2, 2, 32)
    sequence = bench.sequence(20)
    width = (bench.config.num_heads + 2 * bench.config.num_kv_heads) * 32
    qkv = np.random.default_rng(3).standard_normal((20, width)).astype(np.float32)
    qkv[:, 64:] *= size
    y = kernels.attention(bench.config, bench.cache, LAYER, [(0, 20, sequence.table)], qkv)
    sequence.qkv.append(qkv)
    sequence.length = 20
    assert np.isfinite(y).all()
    if size <= 1.0:
        # Keys of any size that a float16 scale can say; the largest values are cut off there.
        expected = bench.expected(sequence, 20)
        assert np.abs(y - expected).max() <= bench.tolerance * max(np.abs(expected).max(), 1e-30)
