"""The runner: what ``auto`` comes to, what it refuses, and one plan in, one result out."""

import dataclasses
import threading
from pathlib import Path

import pytest
import torch

from engine import runner as runner_module
from engine.config import EngineConfig
from engine.errors import CapacityError, ModelError
from engine.kv.manager import BlockCopy
from engine.loaders.files import ModelFiles
from engine.loaders.open import open_model
from engine.plan import Fork, ScheduledSequence, StepPlan
from engine.request import SamplingParams
from engine.runner import Runner, default_kv_cache_bytes
from tests.engine.models.tiny_llama import SHAPES, oracle_logits, random_llama, write_directory

GREEDY = SamplingParams(temperature=0.0)
SHAPE = SHAPES[1]
CONFIG = EngineConfig(dtype="float32", block_size=16, kv_cache_bytes=1 << 20)


@pytest.fixture(scope="module")
def model():
    return random_llama(SHAPE)


@pytest.fixture(scope="module")
def files(model, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return open_model(str(write_directory(model, tmp_path_factory.mktemp("model") / "tiny")))


@pytest.fixture
def runner(files: ModelFiles) -> Runner:
    return Runner(CONFIG, files)


def sequence(
    ids: list[int],
    start: int = 0,
    table: tuple[int, ...] = (4, 1, 7, 3),
    request_id: str = "r",
    samples: bool = True,
    sampling: SamplingParams = GREEDY,
) -> ScheduledSequence:
    return ScheduledSequence(request_id, tuple(ids), start, table, samples, sampling)


def test_what_it_says_of_itself(runner: Runner, files: ModelFiles) -> None:
    block_bytes = 3 * 2 * 16 * 2 * 32 * 4
    assert runner.model_config is files.config
    assert runner.layout.dtype == "float32"
    assert runner.layout.block_bytes == block_bytes
    assert runner.num_blocks == runner.cache.num_blocks == (1 << 20) // block_bytes
    assert runner.max_context == 256
    assert len(bytes.fromhex(runner.model_digest)) == 32


def test_greedy_generation_equals_the_oracle(runner: Runner, model) -> None:
    ids = [5, 77, 200, 31, 9, 9, 120]
    output: list[int] = []
    computed = 0
    told: list[int] = []
    while len(output) < 12:
        known = ids + output
        result = runner.run(StepPlan(0, (sequence(known[computed:], computed),)), told.append)
        computed = len(known)
        output.append(result.token_ids["r"])
        assert output[-1] == int(oracle_logits(model, known)[-1].argmax())
    assert told == [0, 1, 2] * 12


@pytest.mark.parametrize("block_size", [1, 8, 24, 64])
def test_any_block_size_runs(files: ModelFiles, model, block_size: int) -> None:
    config = EngineConfig(dtype="float32", block_size=block_size, kv_cache_bytes=1 << 20)
    ids = [5, 77, 200, 31, 9, 9, 120, 4, 4, 18]
    table = tuple(reversed(range(len(ids))))
    result = Runner(config, files).run(StepPlan(0, (sequence(ids, table=table),)))
    assert result.token_ids["r"] == int(oracle_logits(model, ids)[-1].argmax())


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_forks_sample_alone_and_write_apart(files: ModelFiles, kernels: str) -> None:
    """One prompt, three answers, block 1 half full: two of them go on in copies of it."""
    runner = Runner(dataclasses.replace(CONFIG, kernels=kernels), files)
    ids = [5, 77, 200, 31, 9, 9, 120, 4, 4, 18, 3, 2, 1, 50, 60, 70, 80, 90]
    drawn = [SamplingParams(temperature=1.5, seed=seed) for seed in (1, 2, 3)]
    names = ["r", "r/1", "r/2"]
    alone: list[list[int]] = []
    for sampling in drawn:
        tokens: list[int] = []
        for _ in range(3):
            row = sequence(ids + tokens, table=(9, 8), sampling=sampling)
            tokens.append(runner.run(StepPlan(0, (row,))).token_ids["r"])
        alone.append(tokens)
    forks = tuple(Fork(n, s) for n, s in zip(names[1:], drawn[1:], strict=True))
    prompt = dataclasses.replace(sequence(ids, table=(0, 1), sampling=drawn[0]), forks=forks)
    bystander = sequence([7, 8], table=(5,), request_id="other")
    result = runner.run(StepPlan(1, (bystander, prompt)))
    assert set(result.token_ids) == {"other", *names}
    together = [[result.token_ids[name]] for name in names]
    copies: tuple[BlockCopy, ...] = (BlockCopy(1, 2), BlockCopy(1, 3))
    for _ in range(2):
        rows = tuple(
            sequence([tokens[-1]], len(ids) + len(tokens) - 1, (0, last), name, sampling=sampling)
            for tokens, last, name, sampling in zip(together, (2, 3, 1), names, drawn, strict=True)
        )
        result = runner.run(StepPlan(2, rows, copies=copies))
        copies = ()
        for tokens, name in zip(together, names, strict=True):
            tokens.append(result.token_ids[name])
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) > 1


def test_only_sequences_that_sample_are_answered(runner: Runner) -> None:
    plan = StepPlan(
        0,
        (
            sequence([1, 2, 3], table=(0,), request_id="a", samples=False),
            sequence([4, 5], table=(1,), request_id="b"),
        ),
    )
    result = runner.run(plan)
    assert set(result.token_ids) == {"b"}
    assert not result.failures
    silent = runner.run(StepPlan(1, (sequence([4], 3, (0,), "a", samples=False),)))
    assert not silent.token_ids
    assert not silent.failures


def test_a_sampled_token_depends_on_seed_and_position_not_on_company(runner: Runner) -> None:
    drawn = SamplingParams(temperature=1.5, seed=12)
    alone = runner.run(StepPlan(0, (sequence([8, 9, 10], sampling=drawn),))).token_ids["r"]
    others = tuple(
        sequence([i, i + 1], table=(10 + i,), request_id=f"o{i}", sampling=SamplingParams(seed=i))
        for i in range(5)
    )
    mine = sequence([10], 2, sampling=drawn)
    assert runner.run(StepPlan(1, (*others, mine))).token_ids["r"] == alone
    seeds = [SamplingParams(temperature=1.5, seed=seed) for seed in range(20)]
    plans = [StepPlan(2, (sequence([10], 2, sampling=sampling),)) for sampling in seeds]
    assert len({runner.run(plan).token_ids["r"] for plan in plans}) > 1


def test_a_sequence_with_broken_kv_fails_alone(runner: Runner) -> None:
    good = sequence([3, 4, 5], table=(0,), request_id="good")
    expected = runner.run(StepPlan(0, (good,))).token_ids["good"]
    runner.cache.layers[1][1] = float("nan")
    broken = sequence([6], 4, table=(1,), request_id="broken")
    result = runner.run(StepPlan(1, (broken, good)))
    assert result.token_ids == {"good": expected}
    assert result.failures == {"broken": "the model's logits are not finite for this sequence"}


def test_any_thread_may_run_it(runner: Runner) -> None:
    plan = StepPlan(0, (sequence([1, 2, 3]),))
    here = runner.run(plan).token_ids
    there: list[object] = []

    def step() -> None:
        there.append((runner.run(plan).token_ids, torch.get_num_threads()))

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert there == [(here, 1)]


def test_results_do_not_carry_over_from_earlier_owners_of_a_block(
    runner: Runner, files: ModelFiles
) -> None:
    ids = [7, 8, 9, 10, 11]
    expected = Runner(CONFIG, files).run(StepPlan(0, (sequence(ids),))).token_ids
    runner.run(StepPlan(0, (sequence(list(range(30))),)))
    assert runner.run(StepPlan(1, (sequence(ids),))).token_ids == expected


# ---- what it settles -------------------------------------------------------------------------


def test_bfloat16_has_a_bfloat16_cache(files: ModelFiles) -> None:
    runner = Runner(EngineConfig(dtype="bfloat16", block_size=16, kv_cache_bytes=1 << 20), files)
    assert runner.layout.dtype == "bfloat16"
    assert runner.cache.layers[0].dtype == torch.bfloat16
    assert runner.run(StepPlan(0, (sequence([1, 2, 3]),))).token_ids.keys() == {"r"}


def test_default_kv_bytes_are_an_eighth_of_memory_at_most_a_gib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 18}
    monkeypatch.setattr(runner_module.os, "sysconf", sizes.__getitem__)
    assert default_kv_cache_bytes() <= 1 << 27
    sizes["SC_PHYS_PAGES"] = 1 << 30
    assert default_kv_cache_bytes() <= 1 << 30


@pytest.mark.parametrize(
    ("asked", "kv_blocks", "context"),
    [(0, 50, 256), (0, 10, 160), (200, 50, 200), (160, 10, 160)],
)
def test_max_context(files: ModelFiles, asked: int, kv_blocks: int, context: int) -> None:
    block_bytes = files.config.kv_layout("float32", 16).block_bytes
    config = EngineConfig(
        dtype="float32", block_size=16, kv_cache_bytes=kv_blocks * block_bytes, max_context=asked
    )
    assert Runner(config, files).max_context == context


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"device": "cuda"}, ModelError, "use --device cpu"),
        ({"device": "abacus"}, ModelError, "device abacus: unknown"),
        ({"dtype": "float8"}, ModelError, "dtype float8: unknown; use"),
        ({"deterministic": True, "kernels": "torch"}, ModelError, "drop --deterministic"),
        ({"kv_cache_bytes": 1000}, CapacityError, "raise --kv-cache-bytes"),
        ({"max_context": 257}, CapacityError, "trained for 256 tokens"),
        ({"kv_cache_bytes": 1 << 16, "max_context": 200}, CapacityError, "holds 32 tokens"),
    ],
)
def test_what_it_refuses(
    files: ModelFiles, change: dict[str, object], error: type[Exception], says: str
) -> None:
    settings = {"dtype": "float32", "block_size": 16, "kv_cache_bytes": 1 << 20} | change
    with pytest.raises(error, match=says) as raised:
        Runner(EngineConfig(**settings), files)
    assert "\n" not in str(raised.value)


def test_the_digest_names_files_and_recipe(files: ModelFiles, model, tmp_path: Path) -> None:
    def digest(of: ModelFiles, dtype: str = "float32", block_size: int = 16) -> str:
        config = EngineConfig(dtype=dtype, block_size=block_size, kv_cache_bytes=1 << 20)
        return Runner(config, of).model_digest

    again = open_model(str(write_directory(model, tmp_path / "copy")))
    other = open_model(str(write_directory(random_llama(SHAPE, seed=1), tmp_path / "other")))
    assert digest(files) == digest(again) == digest(files, block_size=32)
    assert len({digest(files), digest(files, "bfloat16"), digest(other)}) == 3
