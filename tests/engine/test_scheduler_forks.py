"""Several answers to one prompt: when they begin, what they share, how each ends alone."""

import pytest

from engine.errors import CapacityError, IllegalTransition
from engine.plan import Failed, Fork, Sampled, StepResult
from engine.request import FinishReason, Purpose, SamplingParams, fork_seed, forks_of
from tests.engine.scheduler_bench import EOS, Bench, spans

THREE = SamplingParams(max_tokens=1000, seed=5, n=3)
NAMES = ["a", "a/1", "a/2"]


def test_every_answer_has_its_seed_and_the_first_keeps_the_requests() -> None:
    assert fork_seed(5, 0) == 5
    seeds = {fork_seed(seed, index) for seed in range(50) for index in range(16)}
    assert len(seeds) == 800 and all(0 <= seed < 2**64 for seed in seeds)
    assert 0 <= fork_seed(2**64 - 1, 15) < 2**64
    first, *others = forks_of(Bench().request("a", 10, THREE))
    assert first.sampling is THREE
    assert [(r.request_id, r.sampling.n, r.sampling.seed) for r in others] == [
        (f"a/{index}", 1, fork_seed(5, index)) for index in (1, 2)
    ]


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 32])
def test_forks_begin_where_the_prompt_ends(num_tokens: int) -> None:
    bench = Bench()
    bench.add("a", num_tokens, sampling=THREE)
    plan = bench.plan(16)
    if num_tokens > 16:
        assert plan.sequences[0].forks == ()
        bench.apply(plan)
        plan = bench.plan(16)
    assert plan.sequences[0].forks == tuple(
        Fork(r.request_id, r.sampling) for r in forks_of(bench.request("a", 10, THREE))[1:]
    )
    result = StepResult({"a": 7, "a/1": 8, "a/2": 9})
    assert bench.scheduler.apply(plan, result) == [
        Sampled(name, token_id, None) for name, token_id in zip(NAMES, (7, 8, 9), strict=True)
    ]
    plan = bench.plan()
    assert spans(plan) == [(name, num_tokens, num_tokens + 1) for name in NAMES]
    assert [row.token_ids for row in plan.sequences] == [(7,), (8,), (9,)]
    is_partial = num_tokens % 16 > 0
    assert len(plan.copies) == 2 * is_partial
    assert len({row.block_table[-1] for row in plan.sequences}) == 3
    num_full = num_tokens // 16
    assert len({row.block_table[:num_full] for row in plan.sequences}) == 1
    bench.apply(plan)
    assert bench.plan().copies == ()


def test_one_answer_ends_and_the_others_go_on() -> None:
    bench = Bench()
    bench.add("a", 20, sampling=THREE)
    first = bench.scheduler.apply(bench.plan(), StepResult({"a": EOS, "a/1": 8, "a/2": 9}))
    assert first[0] == Sampled("a", EOS, FinishReason.STOP)
    bench.scheduler.check_integrity()
    assert [row.request_id for row in bench.plan().sequences] == NAMES[1:]
    bench.scheduler.finish("a/1")
    bench.scheduler.check_integrity()
    bench.scheduler.finish("a/2")
    assert bench.scheduler.fail([], "over") == []
    assert bench.kv.stats().held == 0 and not bench.scheduler.has_work()


def test_a_target_joins_with_a_first_token_each() -> None:
    bench = Bench()
    request = bench.request("a", 20, THREE)
    assert bench.scheduler.reserve(request, 0.0) is not None
    with pytest.raises(IllegalTransition, match="1 first tokens for 3 answers"):
        bench.scheduler.join("a", 7)
    bench.scheduler.join("a", 7, EOS, 9)
    bench.scheduler.check_integrity()
    plan = bench.plan()
    assert spans(plan) == [("a", 20, 21), ("a/2", 20, 21)]
    assert [row.token_ids for row in plan.sequences] == [(7,), (9,)]


def test_a_source_samples_for_all_and_forks_nothing() -> None:
    bench = Bench()
    bench.add("a", 20, Purpose.SOURCE, sampling=THREE)
    bench.plan()
    bench.scheduler.grant("a")
    events = bench.scheduler.apply(bench.plan(), StepResult({"a": 7, "a/1": 8, "a/2": EOS}))
    assert events[1:] == [
        Sampled(name, token_id, None) for name, token_id in zip(NAMES, (7, 8, EOS), strict=True)
    ]
    assert bench.kv.sequence_ids == {"a"}


def test_what_fails_before_it_forked_fails_for_all() -> None:
    bench = Bench()
    bench.add("a", 20, sampling=THREE)
    events = bench.scheduler.apply(bench.plan(), StepResult({}, {"a": "not finite"}))
    assert events == [Failed(name, "not finite") for name in NAMES]
    bench.add("b", 20, sampling=THREE)
    bench.plan()
    assert [event.request_id for event in bench.scheduler.fail(["b"], "crashed")] == [
        "b",
        "b/1",
        "b/2",
    ]
    assert bench.kv.stats().held == 0


def test_answers_take_slots_before_they_begin() -> None:
    bench = Bench(slots=4)
    bench.add("a", 20, sampling=THREE)
    bench.add("b", 20, sampling=SamplingParams(max_tokens=1000, n=2))
    bench.add("c", 20)
    bench.plan()
    assert bench.picked == ["a", "c"]


def test_a_fork_is_preempted_alone_and_computed_again_alone() -> None:
    bench = Bench(num_blocks=5)
    bench.add("a", 20, sampling=THREE)
    for _ in range(14):
        bench.step()
    assert bench.scheduler.stats().num_preemptions == 1
    assert [row.request_id for row in bench.plan().sequences] == NAMES[:2]


@pytest.mark.parametrize(
    ("num_blocks", "slots", "reason"), [(20, 2, "max-decode-sequences"), (3, 8, "KV cache")]
)
def test_more_answers_than_can_ever_be_are_refused(
    num_blocks: int, slots: int, reason: str
) -> None:
    bench = Bench(num_blocks=num_blocks, slots=slots)
    with pytest.raises(CapacityError, match=reason):
        bench.add("a", 20, sampling=THREE)
