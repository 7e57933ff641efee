"""The scheduler by example: steps, endings, running forwards, publication, block edges."""

import pytest

from engine.errors import (
    CapacityError,
    IllegalTransition,
    IntegrityError,
    InvalidConfig,
    InvalidRequest,
)
from engine.plan import Failed, Sampled, StepPlan, StepResult
from engine.request import FinishReason, Purpose, Request, SamplingParams
from tests.engine.scheduler_bench import BLOCK, EOS, LONG, Bench, spans

# ---- a step --------------------------------------------------------------------------------------


def test_decodes_come_first_and_chunks_fill_the_rest() -> None:
    bench = Bench(budget=64)
    bench.add("a", 10)
    bench.step()
    bench.add("b", 100)
    plan = bench.plan()
    assert spans(plan) == [("a", 10, 11), ("b", 0, 48)]
    assert (plan.num_decode_tokens, plan.num_prefill_tokens, plan.num_tokens) == (1, 48, 49)
    assert [row.samples for row in plan.sequences] == [True, False]
    bench.apply(plan)
    plan = bench.plan()
    assert spans(plan) == [("a", 11, 12), ("b", 48, 100)]
    assert [row.samples for row in plan.sequences] == [True, True]


def test_prefill_first_reads_prompts_alone_then_lets_the_decodes_step() -> None:
    bench = Bench(schedule="prefill_first", prefill_steps=2)
    bench.add("a", 10)
    bench.step()
    bench.add("b", 100)
    seen = []
    for _ in range(8):
        plan = bench.plan(limit=32)
        seen.append([row.request_id for row in plan.sequences])
        bench.apply(plan)
    assert seen == [["b"], ["a"], ["b"], ["b"], ["a"], ["b"], ["a", "b"], ["a", "b"]]


def test_so_many_prompts_in_a_step() -> None:
    bench = Bench(prefill_batch=2)
    for name in "abc":
        bench.add(name, 10)
    assert [row.request_id for row in bench.plan().sequences] == ["a", "b"]
    assert bench.picked == ["a", "b"]


def test_a_limit_below_a_block_still_gets_on() -> None:
    bench = Bench()
    bench.add("a", 40)
    assert spans(bench.plan(limit=1)) == [("a", 0, 16)]


def test_an_empty_plan_is_not_in_flight() -> None:
    bench = Bench()
    assert bench.plan().sequences == ()
    assert bench.apply(bench.plan()) == []
    assert not bench.scheduler.has_work()


def test_one_step_at_a_time() -> None:
    bench = Bench()
    bench.add("a", 40)
    plan = bench.plan(16)
    with pytest.raises(IllegalTransition, match="in flight"):
        bench.plan()
    assert bench.apply(StepPlan(plan.step)) == []
    bench.apply(plan)
    with pytest.raises(IllegalTransition, match="not in flight"):
        bench.apply(plan)
    bench.step()
    with pytest.raises(IllegalTransition, match="not in flight"):
        bench.apply(plan)


def test_a_row_without_a_token_is_planned_again() -> None:
    bench = Bench()
    bench.add("a", 10)
    bench.step()
    plan = bench.plan()
    assert bench.scheduler.apply(plan, StepResult({})) == []
    assert spans(bench.plan()) == spans(plan)


def test_a_failed_row_ends_and_the_others_stand() -> None:
    bench = Bench()
    bench.add("a", 20)
    bench.add("b", 20)
    plan = bench.plan()
    result = StepResult({"b": 7}, {"a": "not finite"})
    events = bench.scheduler.apply(plan, result)
    assert events == [Failed("a", "not finite"), Sampled("b", 7, None)]
    bench.scheduler.check_integrity()
    # What a failed row wrote is found by nobody.
    assert bench.kv.stats().cached == 0


def test_a_crashed_step_ends_those_named_and_spares_the_others() -> None:
    bench = Bench()
    bench.add("a", 10)
    bench.add("b", 10)
    plan = bench.plan()
    bench.scheduler.finish("b")
    assert bench.scheduler.fail(["b"], "crashed") == []
    assert bench.kv.stats().held == 1
    assert spans(bench.plan()) == spans(plan)[:1]


# ---- endings -------------------------------------------------------------------------------------


def test_exactly_one_token_for_max_tokens_1() -> None:
    bench = Bench()
    bench.add("a", 10, sampling=SamplingParams(max_tokens=1))
    assert bench.step() == [Sampled("a", 7, FinishReason.LENGTH)]
    assert not bench.scheduler.has_work()
    assert bench.kv.stats().held == 0


@pytest.mark.parametrize(
    ("sampling", "token_id", "reason"),
    [
        (LONG, EOS, FinishReason.STOP),
        (SamplingParams(max_tokens=1), EOS, FinishReason.STOP),
        (SamplingParams(max_tokens=9, ignore_eos=True), EOS, None),
        (SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(EOS,)), EOS, "stop"),
        (SamplingParams(max_tokens=9, stop_token_ids=(7, 9)), 9, FinishReason.STOP),
        (SamplingParams(max_tokens=9, stop_token_ids=(9,)), 7, None),
    ],
)
def test_stop_tokens(sampling: SamplingParams, token_id: int, reason: str | None) -> None:
    bench = Bench()
    bench.add("a", 10, sampling=sampling)
    bench.token_id = token_id
    assert bench.step() == [Sampled("a", token_id, reason)]  # type: ignore[arg-type]
    assert bench.scheduler.has_work() == (reason is None)
    request = bench.request("a", 10, sampling)
    assert bench.scheduler.finish_reason(request, token_id, 1) == reason


def test_the_context_ends_an_answer() -> None:
    bench = Bench(max_context=14)
    bench.add("a", 10)
    assert len(bench.run_out("a")) == 4
    assert bench.kv.stats().held == 0


def test_the_whole_kv_cache_ends_an_answer() -> None:
    bench = Bench(num_blocks=2)
    bench.add("a", 30)
    assert bench.scheduler.max_sequence_tokens == 32
    assert len(bench.run_out("a")) == 2


@pytest.mark.parametrize("purpose", Purpose)
def test_what_can_never_fit_is_refused_at_once(purpose: Purpose) -> None:
    bench = Bench(num_blocks=2)
    request = bench.request("a", 32)
    with pytest.raises(CapacityError, match=r"32 tokens.*shorten the prompt"):
        if purpose is Purpose.TARGET:
            bench.scheduler.reserve(request, 0.0)
        else:
            bench.scheduler.add(request, purpose, 0.0)
    with pytest.raises(InvalidRequest, match="empty"):
        if purpose is Purpose.TARGET:
            bench.scheduler.reserve(bench.request("b", 0), 0.0)
        else:
            bench.scheduler.add(bench.request("b", 0), purpose, 0.0)
    assert bench.scheduler.num_waiting == 0


def test_an_id_in_use_is_refused_and_harms_nobody() -> None:
    bench = Bench()
    bench.add("a", 10)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="in use"):
            bench.add("a", 12)
        with pytest.raises(InvalidRequest, match="in use"):
            bench.scheduler.reserve(bench.request("a", 12), 0.0)
        bench.step()
    with pytest.raises(IllegalTransition, match="reserve"):
        bench.add("b", 12, Purpose.TARGET)
    assert bench.scheduler.num_running == 1


def test_a_budget_without_room_for_prefill_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="token_budget 30: must be at least"):
        Bench(budget=30, slots=16)


# ---- blocks of a running forward -----------------------------------------------------------------


def test_blocks_of_a_running_forward_are_not_given_away() -> None:
    bench = Bench(num_blocks=2)
    bench.add("a", 30)
    plan = bench.plan()
    bench.scheduler.finish("a")
    bench.scheduler.check_integrity()
    other = bench.request("b", 10)
    assert bench.scheduler.reserve(other, 0.0) is None
    assert bench.apply(plan) == []
    assert bench.scheduler.reserve(other, 0.0) is not None


def test_an_id_may_return_while_its_former_step_runs() -> None:
    bench = Bench()
    bench.add("a", 30)
    plan = bench.plan()
    bench.scheduler.finish("a")
    again = bench.request("a", 20)
    assert bench.scheduler.reserve(again, 0.0) is None
    bench.scheduler.check_integrity()
    assert bench.apply(plan) == []
    reservation = bench.scheduler.reserve(again, 0.0)
    assert reservation is not None and len(reservation.block_table) == 2


# ---- publication ---------------------------------------------------------------------------------


def test_a_decoded_block_is_found_one_step_after_its_last_token() -> None:
    bench = Bench()
    bench.add("a", 15)
    bench.step()
    prompt = (*bench.request("a", 15).prompt_token_ids, 7, 7, 7)
    assert bench.kv.stats().held == 1
    probe = bench.kv.allocate("probe", prompt)
    assert probe is not None and probe.num_cached_tokens == 0
    bench.kv.free("probe")
    bench.step()
    probe = bench.kv.allocate("probe", prompt)
    assert probe is not None and probe.num_cached_tokens == 16


# (prompt length, blocks cached before): every edge, with no, a partial and the full hit
EDGES = [
    (k * BLOCK + extra, held)
    for k in (1, 2, 3)
    for extra in (-1, 0, 1)
    for held in sorted({0, 1, k})
]


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize(("num_tokens", "held"), EDGES)
def test_prompts_at_every_edge_of_a_block(purpose: Purpose, num_tokens: int, held: int) -> None:
    bench = Bench()
    tokens = tuple(range(100))
    bench.scheduler.add(Request("warm", tokens[: held * BLOCK + 1], LONG), Purpose.LOCAL, 0.0)
    bench.step()
    bench.scheduler.finish("warm")
    num_cached = min(held, (num_tokens - 1) // BLOCK) * BLOCK
    request = Request("r", tokens[:num_tokens], SamplingParams(max_tokens=BLOCK + 2))
    if purpose is Purpose.TARGET:
        reservation = bench.scheduler.reserve(request, 1.0)
        assert reservation is not None and reservation.num_cached_tokens == num_cached
        bench.scheduler.join("r", 7)
    else:
        bench.scheduler.add(request, purpose, 1.0)
        bench.scheduler.grant("r")
        plan = bench.plan()
        assert spans(plan) == [("r", num_cached, num_tokens)]
        assert Sampled("r", 7, None) in bench.apply(plan)
    if purpose is Purpose.SOURCE:
        assert not bench.scheduler.has_work()
        bench.scheduler.finish("r")
    else:
        assert len(bench.run_out("r")) == BLOCK + 1
    assert bench.kv.stats().held == 0
    bench.scheduler.check_integrity()


# ---- integrity -----------------------------------------------------------------------------------


def test_blocks_held_by_a_stranger_are_found() -> None:
    bench = Bench()
    bench.kv.allocate("stranger", (1, 2, 3))
    with pytest.raises(IntegrityError, match="held by others"):
        bench.scheduler.check_integrity()
