"""Logits of tiny random models agree with ``transformers`` to 1e-4, however a sequence is cut."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from engine.kv.cache import PagedKvCache
from engine.loaders.files import ModelFiles
from engine.loaders.open import open_model
from engine.models.decoder import Decoder
from engine.ops.batch import make_batch
from engine.ops.reference import ReferenceOps
from engine.ops.torch_cpu import TorchCpuOps
from engine.plan import ScheduledSequence
from engine.request import SamplingParams
from tests.engine.models.tiny_llama import (
    SHAPES,
    Shape,
    oracle_logits,
    random_llama,
    write_directory,
    write_gguf,
)

BLOCK_SIZE = 8
NUM_BLOCKS = 64
GREEDY = SamplingParams(temperature=0.0)
OPS = {"torch": TorchCpuOps, "reference": ReferenceOps}
TOLERANCE = 1e-4


def write(model, shape: Shape, folder: Path, kind: str) -> ModelFiles:
    if kind == "gguf":
        return open_model(str(write_gguf(model, shape, folder / "tiny.gguf")))
    return open_model(str(write_directory(model, folder / "tiny")))


class Bench:
    """One model of ours with a cache, asked for the logits of every row."""

    def __init__(self, files: ModelFiles, ops: str = "torch", dtype: str = "float32") -> None:
        self._model = Decoder(files.config, files, OPS[ops](), dtype)
        self.cache = PagedKvCache(files.config.kv_layout(dtype, BLOCK_SIZE), NUM_BLOCKS)
        self.layers: list[int] = []

    @torch.inference_mode()
    def rows(self, *sequences: ScheduledSequence) -> torch.Tensor:
        batch = make_batch(sequences, BLOCK_SIZE)
        every = dataclasses.replace(batch, sample_rows=torch.arange(len(batch.token_ids)))
        return self._model.forward(every, self.cache, self.layers.append)

    @torch.inference_mode()
    def sampled(self, *sequences: ScheduledSequence, on_layer=lambda layer: None) -> torch.Tensor:
        return self._model.forward(make_batch(sequences, BLOCK_SIZE), self.cache, on_layer)


def part(
    ids: list[int], start: int, stop: int, table: tuple[int, ...], samples: bool = True
) -> ScheduledSequence:
    return ScheduledSequence("r", tuple(ids[start:stop]), start, table, samples, GREEDY)


def shuffled_tables(*lengths: int) -> list[tuple[int, ...]]:
    blocks = list(range(NUM_BLOCKS))
    random.Random(1).shuffle(blocks)
    return [tuple(blocks.pop() for _ in range(-(-length // BLOCK_SIZE))) for length in lengths]


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


@pytest.mark.parametrize("kind", ["gguf", "directory"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ops", OPS)
def test_whole_chunked_and_step_by_step(shape: Shape, kind: str, ops: str, tmp_path: Path) -> None:
    model = random_llama(shape)
    files = write(model, shape, tmp_path, kind)
    ids = tokens(150)
    expected = oracle_logits(model, ids)
    assert expected.abs().max() > 3, "logits too small for the tolerance to mean anything"
    for cuts in ([150], [7, 8, 9, 63, 64, 65, 130, 150], [130, *range(131, 151)]):
        bench = Bench(files, ops)
        (table,) = shuffled_tables(150)
        starts = [0, *cuts[:-1]]
        got = [bench.rows(part(ids, a, b, table)) for a, b in zip(starts, cuts, strict=True)]
        torch.testing.assert_close(torch.cat(got), expected, atol=TOLERANCE, rtol=0)


def test_many_sequences_of_all_kinds_in_one_batch(tmp_path: Path) -> None:
    shape = SHAPES[3]
    model = random_llama(shape)
    bench = Bench(write(model, shape, tmp_path, "gguf"))
    # Long and short decodes, a chunk on a prefix, a whole prompt and one token at position 0.
    spans = [(89, 90), (0, 70), (5, 6), (33, 100), (88, 89), (0, 1), (16, 17)]
    prompts = [tokens(stop, seed) for seed, (_, stop) in enumerate(spans)]
    tables = shuffled_tables(*(stop for _, stop in spans))
    for ids, (start, _), table in zip(prompts, spans, tables, strict=True):
        if start:
            bench.rows(part(ids, 0, start, table))
    together = bench.rows(
        *(part(ids, *span, t) for ids, span, t in zip(prompts, spans, tables, strict=True))
    )
    row = 0
    for ids, (start, stop) in zip(prompts, spans, strict=True):
        expected = oracle_logits(model, ids)[start:stop]
        got = together[row : row + stop - start]
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
        row += stop - start


def test_only_sampled_rows_get_logits(tmp_path: Path) -> None:
    shape = SHAPES[0]
    model = random_llama(shape)
    bench = Bench(write(model, shape, tmp_path, "directory"))
    first, second = tokens(20, 1), tokens(13, 2)
    one, two = shuffled_tables(20, 13)
    got = bench.sampled(part(first, 0, 20, one, samples=False), part(second, 0, 13, two))
    expected = oracle_logits(model, second)[-1:]
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
    nobody = bench.sampled(part(first, 0, 20, one, samples=False))
    assert nobody.shape == (0, model.config.vocab_size)


@pytest.mark.parametrize("samples", [True, False])
def test_a_layer_is_told_when_its_kv_is_written_and_the_next_is_not(
    samples: bool, tmp_path: Path
) -> None:
    shape = SHAPES[1]
    bench = Bench(write(random_llama(shape), shape, tmp_path, "directory"))
    (table,) = shuffled_tables(24)
    seen: list[list[bool]] = []

    def on_layer(layer: int) -> None:
        assert layer == len(seen)
        written = [all(any(bench.cache.region(i, b)) for b in table) for i in range(3)]
        seen.append(written)

    bench.sampled(part(tokens(24), 0, 24, table, samples), on_layer=on_layer)
    assert seen == [[True, False, False], [True, True, False], [True, True, True]]


def test_the_rest_of_the_cache_is_left_alone(tmp_path: Path) -> None:
    shape = SHAPES[2]
    bench = Bench(write(random_llama(shape), shape, tmp_path, "gguf"))
    for layer in bench.cache.layers:
        layer.fill_(float("nan"))
    (table,) = shuffled_tables(20)
    got = bench.rows(part(tokens(20), 0, 20, table))
    assert got.isfinite().all(), "read a row that was never written"
    untouched = sorted(set(range(NUM_BLOCKS)) - set(table))
    for layer in bench.cache.layers:
        assert layer[untouched].isnan().all()
        assert layer[table[-1], :, 20 % BLOCK_SIZE :].isnan().all()


def test_bfloat16_is_close(tmp_path: Path) -> None:
    shape = SHAPES[1]
    model = random_llama(shape)
    ids = tokens(100)
    expected = oracle_logits(model, ids)
    bench = Bench(write(model, shape, tmp_path, "directory"), dtype="bfloat16")
    (table,) = shuffled_tables(100)
    got = torch.cat([bench.rows(part(ids, 0, 64, table)), bench.rows(part(ids, 64, 100, table))])
    assert got.dtype == torch.float32
    error = (got - expected).norm() / expected.norm()
    assert error < 0.05
