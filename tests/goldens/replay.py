"""Answers of goldens by a runner under the smallest scheduler there is.

A failure here is the model's, not the engine's. Used by the tests of every real model.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.plan import ScheduledSequence, StepPlan
from engine.request import SamplingParams
from engine.runner import Runner

BLOCK_SIZE = 16
# A step carries at most this many prompt tokens where chunks are not asked for.
WHOLE = 1 << 20
_GREEDY = SamplingParams(temperature=0.0)


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
        return ScheduledSequence(self.name, some, start, self.block_table, samples, _GREEDY)


def tables(goldens: list[dict], num_tokens: int) -> Iterator[tuple[int, ...]]:
    """Blocks of all sequences, shuffled: neighbours in a sequence are not neighbours in memory."""
    needed = [-(-(len(g["prompt_token_ids"]) + num_tokens) // BLOCK_SIZE) for g in goldens]
    blocks = list(range(sum(needed)))
    random.Random(0).shuffle(blocks)
    for count in needed:
        yield tuple(blocks[:count])
        del blocks[:count]


def answers(runner: Runner, goldens: list[dict], chunk: int, num_tokens: int) -> list[Run]:
    """Run all of them at once, every step carrying every unfinished one."""
    runs = [Run(g, table) for g, table in zip(goldens, tables(goldens, num_tokens), strict=True)]
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
