"""Greedy float32 answers of the demo model equal ``transformers``, token for token.

The runner is driven by the smallest scheduler there is (below), so that a failure here is the
model's, not the engine's. The answers and how they were made: ``tests/goldens``.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.loaders.open import open_model
from engine.plan import ScheduledSequence, StepPlan
from engine.request import SamplingParams
from engine.runner import Runner

GOLDENS = json.loads(
    (Path(__file__).parent.parent / "goldens" / "smollm2_greedy_float32.json").read_text("utf-8")
)
BY_NAME = {golden["name"]: golden for golden in GOLDENS}
GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 16
NUM_TOKENS = 64
# A step carries at most this many prompt tokens where chunks are not asked for.
WHOLE = 1 << 20


@dataclass
class Run:
    """One golden on its way."""

    golden: dict
    block_table: tuple[int, ...]
    num_computed_tokens: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.golden["name"]

    def schedule(self, chunk: int) -> ScheduledSequence:
        tokens = self.golden["prompt_token_ids"] + self.output
        start = self.num_computed_tokens
        stop = min(len(tokens), start + chunk)
        samples = stop == len(tokens)
        some = tuple(tokens[start:stop])
        return ScheduledSequence(self.name, some, start, self.block_table, samples, GREEDY)


def tables(goldens: list[dict]) -> Iterator[tuple[int, ...]]:
    """Blocks of all sequences, shuffled: neighbours in a sequence are not neighbours in memory."""
    needed = [-(-(len(g["prompt_token_ids"]) + NUM_TOKENS) // BLOCK_SIZE) for g in goldens]
    blocks = list(range(sum(needed)))
    random.Random(0).shuffle(blocks)
    for count in needed:
        yield tuple(blocks[:count])
        del blocks[:count]


def answers(runner: Runner, goldens: list[dict], chunk: int, num_tokens: int) -> list[Run]:
    """Run all of them at once, every step carrying every unfinished one."""
    runs = [Run(g, table) for g, table in zip(goldens, tables(goldens), strict=True)]
    while unfinished := [run for run in runs if len(run.output) < num_tokens]:
        scheduled = {run.name: run.schedule(chunk) for run in unfinished}
        result = runner.run(StepPlan(0, tuple(scheduled.values())))
        assert not result.failures
        for run in unfinished:
            run.num_computed_tokens = scheduled[run.name].end
            if run.name in result.token_ids:
                run.output.append(result.token_ids[run.name])
    return runs


def check(runs: list[Run]) -> None:
    wrong = []
    for run in runs:
        expected, gaps = run.golden["output_token_ids"], run.golden["gaps"]
        for i, (got, right) in enumerate(zip(run.output, expected, strict=False)):
            if got != right:
                wrong.append(f"{run.name}: token {i} is {got}, not {right}; gap {gaps[i]}")
                break
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module", params=["auto", "torch"])
def runner(request: pytest.FixtureRequest) -> Runner:
    """Once on the native kernels, where there are any, and once on torch."""
    config = EngineConfig(
        dtype="float32",
        kernels=request.param,
        block_size=BLOCK_SIZE,
        kv_cache_bytes=160 << 20,
    )
    return Runner(config, open_model("demo"))


def test_the_goldens_are_what_they_should_be() -> None:
    lengths = {len(golden["prompt_token_ids"]) for golden in GOLDENS}
    assert len(GOLDENS) == len(BY_NAME) == 20
    assert {1, 15, 16, 17, 31, 32, 33, 1500} <= lengths
    assert all(len(g["output_token_ids"]) == len(g["gaps"]) == NUM_TOKENS for g in GOLDENS)


def test_prompt_texts_encode_to_their_ids() -> None:
    tokenizer = open_model("demo").tokenizer()
    for golden in GOLDENS:
        assert tokenizer.encode(golden["prompt"]) == golden["prompt_token_ids"], golden["name"]


def test_a_few_prompts_at_once(runner: Runner) -> None:
    names = ("one token", "block size", "two blocks + 1", "chinese", "chat")
    check(answers(runner, [BY_NAME[name] for name in names], chunk=24, num_tokens=24))


def test_one_prompt_alone(runner: Runner) -> None:
    check(answers(runner, [BY_NAME["python"]], WHOLE, num_tokens=24))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", [WHOLE, 64], ids=["whole", "chunks of 64"])
def test_each_prompt_alone(runner: Runner, chunk: int) -> None:
    check([run for g in GOLDENS for run in answers(runner, [g], chunk, NUM_TOKENS)])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", [WHOLE, 64], ids=["whole", "chunks of 64"])
def test_eight_prompts_at_once(runner: Runner, chunk: int) -> None:
    for first in range(0, len(GOLDENS), 8):
        check(answers(runner, GOLDENS[first : first + 8], chunk, NUM_TOKENS))
