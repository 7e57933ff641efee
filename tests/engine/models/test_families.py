"""Every family agrees with ``transformers`` to 1e-4, from both formats, however a text is cut."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from engine.kv.cache import PagedKvCache
from engine.loaders.open import open_model
from engine.models.decoder import Decoder
from engine.ops.batch import make_batch
from engine.ops.reference import ReferenceOps
from engine.ops.torch_cpu import TorchCpuOps
from engine.plan import ScheduledSequence
from engine.request import SamplingParams
from tests.engine.models.tiny_families import (
    CASES,
    DIRECTORY_ONLY,
    random_model,
    write_directory,
    write_gguf,
)

BLOCK_SIZE = 8
LENGTH = 110
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0.0)
# Whole; in chunks that end inside and at windows and tiles, then token by token.
CUTS = ([LENGTH], [9, 24, 25, 90, *range(91, LENGTH + 1)])


def cut_logits(path: Path, ops: TorchCpuOps | ReferenceOps, ids: list[int], cuts: list[int]):
    """Logits of every row."""
    files = open_model(str(path))
    model = Decoder(files.config, files, ops, "float32")
    num_blocks = -(-LENGTH // BLOCK_SIZE)
    cache = PagedKvCache(files.config.kv_layout("float32", BLOCK_SIZE), num_blocks)
    table = tuple(random.Random(1).sample(range(num_blocks), num_blocks))
    parts = []
    for start, stop in zip([0, *cuts[:-1]], cuts, strict=True):
        part = ScheduledSequence("r", tuple(ids[start:stop]), start, table, True, GREEDY)
        batch = make_batch((part,), BLOCK_SIZE)
        every = dataclasses.replace(batch, sample_rows=torch.arange(stop - start))
        parts.append(model.forward(every, cache, lambda layer: None))
    return torch.cat(parts)


# Both formats, but for what GGUF has no key for.
WRITTEN = [(case, "directory") for case in CASES]
WRITTEN += [(case, "gguf") for case in CASES if case not in DIRECTORY_ONLY]


@pytest.mark.parametrize(("case", "kind"), WRITTEN)
@torch.inference_mode()
def test_logits_are_those_of_transformers(case: str, kind: str, tmp_path: Path) -> None:
    model = random_model(case)
    ids = random.Random(0).choices(range(256), k=LENGTH)
    expected = model(torch.tensor([ids]), use_cache=False).logits[0]
    assert expected.std() > 1, "logits too alike for the tolerance to mean anything"
    path = tmp_path / "tiny.gguf"
    path = write_gguf(model, case, path) if kind == "gguf" else write_directory(model, tmp_path)
    for ops in (TorchCpuOps(), ReferenceOps()):
        for cuts in CUTS:
            got = cut_logits(path, ops, ids, cuts)
            torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
