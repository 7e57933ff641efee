"""The mock answers by what its cache holds, so KV that went astray cannot go unseen."""

import pytest

from engine.mock_runner import MockRunner, answer, next_token
from engine.plan import ScheduledSequence, StepPlan
from engine.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple(range(40, 77))
TABLE = (9, 2, 30, 4)


def scheduled(
    token_ids: tuple[int, ...],
    start: int = 0,
    table: tuple[int, ...] = TABLE,
    sampling: SamplingParams = GREEDY,
    request_id: str = "r",
    samples: bool = True,
) -> ScheduledSequence:
    return ScheduledSequence(request_id, token_ids, start, table, samples, sampling)


def run_one(runner: MockRunner, sequence: ScheduledSequence) -> int:
    result = runner.run(StepPlan(0, (sequence,)))
    assert not result.failures
    return result.token_ids["r"]


def generate(runner: MockRunner, num_tokens: int, sampling: SamplingParams = GREEDY) -> list[int]:
    runner.run(StepPlan(0, (scheduled(PROMPT[:20], samples=False),)))
    output = [run_one(runner, scheduled(PROMPT[20:], 20, sampling=sampling))]
    for start in range(len(PROMPT), len(PROMPT) + num_tokens - 1):
        output.append(run_one(runner, scheduled((output[-1],), start, sampling=sampling)))
    return output


def test_chunks_and_steps_give_the_answer() -> None:
    assert generate(MockRunner(), 9) == answer(PROMPT, 9)


def test_the_answer_depends_on_every_token_and_its_place() -> None:
    changed = (*PROMPT[:5], 99, *PROMPT[6:])
    swapped = (PROMPT[1], PROMPT[0], *PROMPT[2:])
    answers = {tuple(answer(prompt, 8)) for prompt in (PROMPT, changed, swapped, PROMPT[:-1])}
    assert len(answers) == 4


def test_sampled_answers_depend_on_the_seed_alone() -> None:
    one, other = (SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2))
    assert generate(MockRunner(), 9, one) == answer(PROMPT, 9, one)
    assert answer(PROMPT, 9, one) != answer(PROMPT, 9, other) != answer(PROMPT, 9, GREEDY)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("index", [0, 7, 9, 17, 31, 16 * 32 + 3, 32 * 32 - 1])
def test_any_changed_byte_fails_the_sequence(layer: int, index: int) -> None:
    runner = MockRunner()
    runner.run(StepPlan(0, (scheduled(PROMPT, samples=False),)))
    runner.cache.region(layer, TABLE[1])[index] ^= 1
    result = runner.run(StepPlan(1, (scheduled((3,), len(PROMPT)),)))
    assert not result.token_ids
    assert f"layer {layer} at position " in result.failures["r"]


def test_a_missing_layer_and_a_missing_block_fail() -> None:
    for layer, block in ((1, TABLE[0]), (0, TABLE[2])):
        runner = MockRunner()
        runner.run(StepPlan(0, (scheduled(PROMPT, samples=False),)))
        region = runner.cache.region(layer, block)
        region[:] = bytes(len(region))
        assert runner.run(StepPlan(1, (scheduled((3,), len(PROMPT)),))).failures


def test_swapped_blocks_fail_and_a_foreign_sequence_answers_otherwise() -> None:
    runner = MockRunner()
    foreign = scheduled(tuple(reversed(PROMPT)), table=(50, 51, 52, 53), samples=False)
    runner.run(StepPlan(0, (scheduled(PROMPT, samples=False), foreign)))
    swapped = (TABLE[1], TABLE[0], *TABLE[2:])
    following = (3,)
    result = runner.run(StepPlan(1, (scheduled(following, len(PROMPT), swapped),)))
    assert "position 0" in result.failures["r"]
    wrong = run_one(runner, scheduled(following, len(PROMPT), foreign.block_table))
    assert wrong != next_token(PROMPT + following)


def test_bytes_carried_to_another_runner_go_on_there() -> None:
    source, target = MockRunner(), MockRunner()
    first = run_one(source, scheduled(PROMPT))
    theirs = (5, 6, 7)
    for layer in range(source.layout.num_layers):
        for ours, block in zip(TABLE, theirs, strict=False):
            target.cache.region(layer, block)[:] = source.cache.region(layer, ours)
    second = run_one(target, scheduled((first,), len(PROMPT), theirs))
    assert [first, second] == answer(PROMPT, 2)


def test_one_broken_row_leaves_the_others() -> None:
    runner = MockRunner()
    good = scheduled(PROMPT, table=(60, 61, 62), request_id="good")
    lost = scheduled((3,), 20, table=(70, 71), request_id="lost")
    result = runner.run(StepPlan(0, (lost, good)))
    assert result.token_ids == {"good": next_token(PROMPT)}
    assert set(result.failures) == {"lost"}


def test_layers_are_told_once_written() -> None:
    runner = MockRunner(num_layers=3)
    told: list[tuple[int, bool, bool]] = []

    def on_layer(layer: int) -> None:
        after = runner.cache.region(min(layer + 1, 2), TABLE[0])
        told.append((layer, any(runner.cache.region(layer, TABLE[0])), any(after)))

    runner.run(StepPlan(0, (scheduled(PROMPT),)), on_layer)
    assert told == [(0, True, False), (1, True, False), (2, True, True)]


def test_a_plan_that_writes_a_slot_twice_or_lacks_a_block_raises() -> None:
    twice = (scheduled((1,), table=(3,)), scheduled((2,), table=(3,), request_id="s"))
    with pytest.raises(ValueError, match="a slot twice"):
        MockRunner().run(StepPlan(0, twice))
    with pytest.raises(ValueError, match="no block for position 36"):
        MockRunner().run(StepPlan(0, (scheduled(PROMPT, table=(1, 2)),)))
