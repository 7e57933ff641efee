"""Native kernels against ``transformers``: every instruction set, recipe and head layout.

float32 must agree to 1e-4. The others are held to the float32 kernels on the weights that they
really multiply, within the error of rounding activations once per matrix: relative to the spread
of the logits, 2 % for bfloat16 and 8 % for int8, on weights far rougher than a trained model's.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import UnsupportedModel
from engine.kv.cache import PagedKvCache
from engine.loaders.files import ModelFiles
from engine.loaders.open import open_model
from engine.models.on_native import FileWeights
from engine.ops.cpu.build import NativeUnavailable, library
from engine.ops.cpu.instruction_sets import (
    AVX2,
    AVX512,
    PORTABLE,
    InstructionSet,
    cpu_features,
    of_this_machine,
)
from engine.ops.cpu.native_model import NativeLlama, SequenceRows
from engine.ops.cpu.weights import PackedWeights
from tests.engine.loaders.llama_files import random_weights, write_gguf
from tests.engine.models.tiny_families import CASES, random_model
from tests.engine.models.tiny_families import write_directory as write_family
from tests.engine.models.tiny_llama import Shape, oracle_logits, random_llama, write_directory
from tests.tiny_model import make_tiny_model

SHAPES = (
    Shape(4, 4, 16, tied=True),
    Shape(4, 2, 32, tied=False),
    Shape(6, 1, 64, tied=True, hidden_size=96),
    Shape(8, 2, 48, tied=True, hidden_size=96),
    Shape(4, 1, 80, tied=False, hidden_size=128),
    Shape(2, 1, 128, tied=True),
)
LENGTHS = (1, 15, 16, 17, 50)
TOLERANCE = {"bf16": 0.02, "int8": 0.08, "file": 0.08}
NUM_BLOCKS = 64


def runs_here(chosen: InstructionSet) -> bool:
    needed = {"avx2": {"avx2", "fma", "f16c"}, "avx512": {"avx512f", "avx512bw", "avx512vl"}}
    return needed.get(chosen.name.partition("+")[0], set()) <= cpu_features()


def sets() -> list[pytest.ParameterSet]:
    """The widest in every run; the others, each a compilation, where there is time."""
    others = [s for s in (AVX512, AVX2, PORTABLE) if s != of_this_machine() and runs_here(s)]
    slow = [pytest.param(s, marks=pytest.mark.slow, id=s.name) for s in others]
    return [pytest.param(of_this_machine(), id=of_this_machine().name), *slow]


@pytest.fixture(scope="module", params=sets())
def instruction_set(request: pytest.FixtureRequest) -> InstructionSet:
    try:
        library(request.param)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    chosen: InstructionSet = request.param
    return chosen


class Bench:
    """One packed model and a cache whose unused rows are not zero."""

    def __init__(
        self,
        files: ModelFiles,
        recipe: str,
        chosen: InstructionSet | None = None,
        threads: int = 1,
        kv_dtype: str = "",
    ) -> None:
        self.model = NativeLlama(
            files.config,
            PackedWeights(files.config, FileWeights(files), recipe),
            threads,
            instruction_set=chosen,
        )
        dtype = "float32" if recipe == "float32" else "bfloat16"
        layout = NativeLlama.kv_layout(files.config, kv_dtype or dtype, 16)
        self.cache = PagedKvCache(layout, NUM_BLOCKS)
        self.cache.fill(0x3C)

    def rows(self, ids: list[list[int]], chunks: list[int]) -> list[torch.Tensor]:
        """Logits of every row of every sequence; all advance together, ``chunks`` rows a step."""
        blocks = list(range(NUM_BLOCKS))
        random.Random(1).shuffle(blocks)
        tables = [np.array([blocks.pop() for _ in range(-(-len(s) // 16))], np.int32) for s in ids]
        done = [0] * len(ids)
        logits: list[list[torch.Tensor]] = [[] for _ in ids]
        while any(d < len(s) for d, s in zip(done, ids, strict=True)):
            step, flat, who = [], [], []
            for i, sequence in enumerate(ids):
                part = sequence[done[i] : done[i] + chunks[i]]
                if part:
                    step.append(SequenceRows(done[i], len(part), tables[i]))
                    flat += part
                    who += [i] * len(part)
                    done[i] += len(part)
            out = self.model.forward(flat, step, range(len(flat)), self.cache)
            for row, i in zip(torch.from_numpy(out), who, strict=True):
                logits[i].append(row)
        return [torch.stack(rows) for rows in logits]


def prompts() -> list[list[int]]:
    return [random.Random(n).choices(range(256), k=n) for n in LENGTHS]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.timeout(300)
def test_float32_equals_transformers(
    shape: Shape, instruction_set: InstructionSet, tmp_path: Path
) -> None:
    """Whole prompts, odd chunks and single tokens of several sequences in the same steps."""
    oracle = random_llama(shape)
    files = open_model(str(write_directory(oracle, tmp_path / "tiny")))
    bench = Bench(files, "float32", instruction_set)
    expected = [oracle_logits(oracle, ids) for ids in prompts()]
    for chunks in ([99] * 5, [1, 7, 16, 1, 13]):
        for got, right in zip(bench.rows(prompts(), chunks), expected, strict=True):
            torch.testing.assert_close(got, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(300)
def test_families_equal_transformers(
    case: str, instruction_set: InstructionSet, tmp_path: Path
) -> None:
    """Biases, norms, windows, soft caps, activations, rope tables stretched or of some layers."""
    oracle = random_model(case, head_dim=32)
    files = open_model(str(write_family(oracle, tmp_path / "tiny")))
    got = Bench(files, "float32", instruction_set).rows(prompts(), [1, 7, 16, 1, 13])
    with torch.inference_mode():
        for ids, rows in zip(prompts(), got, strict=True):
            right = oracle(torch.tensor([ids]), use_cache=False).logits[0]
            torch.testing.assert_close(rows, right, atol=1e-4, rtol=1e-4)


def test_what_torch_serves_is_refused(tmp_path: Path) -> None:
    files = open_model(str(write_family(random_model("qwen3", head_dim=16), tmp_path / "tiny")))
    with pytest.raises(UnsupportedModel, match=r"native kernels: no .*; the torch path serves it"):
        PackedWeights(files.config, FileWeights(files), "float32")


@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
@pytest.mark.parametrize("recipe", ["float32", "bf16"])
@pytest.mark.timeout(300)
def test_a_row_of_a_family_does_not_depend_on_its_batch(
    case: str, recipe: str, instruction_set: InstructionSet, tmp_path: Path
) -> None:
    files = open_model(str(write_family(random_model(case, head_dim=32), tmp_path / "tiny")))
    bench = Bench(files, recipe, instruction_set)
    alone = [bench.rows([ids], [len(ids)])[0] for ids in prompts()]
    together = bench.rows(prompts(), [1, 7, 16, 1, 13])
    for got, right in zip(together, alone, strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize("case", ["", "gemma2", "gemma3"])
@pytest.mark.parametrize("recipe", ["bf16", "int8"])
@pytest.mark.timeout(300)
def test_rounded_recipes_stay_near_float32(
    case: str, recipe: str, instruction_set: InstructionSet, tmp_path: Path
) -> None:
    if case:
        path = write_family(random_model(case, head_dim=32), tmp_path / "tiny")
    else:
        path = make_tiny_model(tmp_path / "tiny")
    files = open_model(str(path))
    right = Bench(files, "float32", instruction_set).rows(prompts(), [99] * 5)
    got = Bench(files, recipe, instruction_set).rows(prompts(), [1, 7, 16, 1, 13])
    check_near(got, right, recipe)


@pytest.mark.timeout(300)
def test_int8_kv_stays_near_float32_however_it_is_cut(
    instruction_set: InstructionSet, tmp_path: Path
) -> None:
    files = open_model(str(make_tiny_model(tmp_path / "tiny")))
    right = Bench(files, "float32", instruction_set).rows(prompts(), [99] * 5)
    bench = Bench(files, "float32", instruction_set, kv_dtype="int8")
    whole, cut = bench.rows(prompts(), [99] * 5), bench.rows(prompts(), [1, 7, 16, 1, 13])
    check_near(cut, right, "bf16")
    for a, b in zip(whole, cut, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.timeout(300)
def test_the_files_blocks_are_multiplied_as_they_are(
    kind: str, instruction_set: InstructionSet, tmp_path: Path
) -> None:
    weights = {n: w * (0.2 if w.ndim > 1 else 1.0) for n, w in random_weights().items()}
    files = open_model(str(write_gguf(tmp_path / "tiny.gguf", weights, default_type=kind)))
    right = Bench(files, "float32", instruction_set).rows(prompts(), [99] * 5)
    got = Bench(files, "file", instruction_set).rows(prompts(), [1, 7, 16, 1, 13])
    check_near(got, right, "file")


@pytest.mark.parametrize("recipe", ["float32", "bf16", "int8", "file"])
@pytest.mark.timeout(300)
def test_a_row_does_not_depend_on_its_batch(
    recipe: str, instruction_set: InstructionSet, tmp_path: Path
) -> None:
    """Bit for bit: alone, among others, and in chunks of other sizes."""
    weights = {n: w * (0.2 if w.ndim > 1 else 1.0) for n, w in random_weights().items()}
    files = open_model(str(write_gguf(tmp_path / "tiny.gguf", weights, default_type="Q4_1")))
    bench = Bench(files, recipe, instruction_set)
    longer = [*prompts(), random.Random(110).choices(range(256), k=110)]
    alone = [bench.rows([ids], [len(ids)])[0] for ids in longer]
    for chunks in ([999] * 6, [1, 7, 16, 1, 13, 100], [2, 15, 3, 17, 1, 5]):
        together = bench.rows(longer, chunks)
        for got, right in zip(together, alone, strict=True):
            assert torch.equal(got, right)


def test_threads_change_nothing(tmp_path: Path) -> None:
    files = open_model(str(make_tiny_model(tmp_path / "tiny")))
    for recipe in ("float32", "bf16", "int8"):
        one = Bench(files, recipe, threads=1).rows(prompts(), [7] * 5)
        two = Bench(files, recipe, threads=2).rows(prompts(), [7] * 5)
        for a, b in zip(one, two, strict=True):
            assert torch.equal(a, b)


def check_near(got: list[torch.Tensor], right: list[torch.Tensor], recipe: str) -> None:
    ours, theirs = torch.cat(got), torch.cat(right)
    error = (ours - theirs).pow(2).mean().sqrt() / theirs.std()
    assert error < TOLERANCE[recipe], f"{recipe}: relative error {error:.3f}"
