"""Placement: who may, who is better, who is next; and whether to use two instances at all."""

from collections import Counter
from typing import Any

import pytest

from services.router.admission import check_in_time
from services.router.disaggregation import Rules, should_deflect
from services.router.membership import InstanceState, InstanceView, Load, Pending, Snapshot
from services.router.placement import Placement, score_decode, score_prefill
from services.router.placement import place as place_demand
from services.router.prediction import Demand, predict_here, predict_pair
from services.router.rates import ENOUGH, Rates
from services.runtime.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from services.runtime.settings import PlacementPolicy, Role
from tests.services.router.conftest import StartRouter
from tests.services.router.fake_worker import FakeWorker
from tests.services.router.harness import collect, generate_request
from tests.services.router.test_membership import instance

READY, STARTING, DRAINING = InstanceState.READY, InstanceState.STARTING, InstanceState.DRAINING


def view(
    instance_id: str,
    role: Role = Role.DECODE,
    state: InstanceState = READY,
    pending: tuple[int, int] = (0, 0),  # requests, and tokens of their prompts
    free: int = 10,
    **described: Any,
) -> InstanceView:
    load = Load(blocks_total=10, blocks_free=free)
    described = {"max_context": 4096} | described
    waiting = Pending(*pending, num_prompts=pending[0] if pending[1] else 0)
    return InstanceView(instance(instance_id, role, **described), state, load, waiting)


def snapshot(*views: InstanceView, was_ready: bool = True) -> Snapshot:
    return Snapshot(views, was_ready)


def place(
    prompt: int,
    max_tokens: int,
    state: Snapshot,
    disaggregate_from: int,
    turn: int = 0,
    avoid: frozenset[str] = frozenset(),
    policy: PlacementPolicy = PlacementPolicy.LEAST_LOADED,
    rates: Rates | None = None,
    **cached: int,
) -> Placement:
    demand, rules = Demand(prompt, max_tokens, cached), Rules(disaggregate_from, policy)
    return place_demand(demand, state, rules, rates or Rates(), turn, avoid)


P, D, C = view("p", Role.PREFILL), view("d"), view("c", Role.COLOCATED)


@pytest.mark.parametrize(
    ("views", "prompt", "max_tokens", "disaggregate"),
    [
        ((P, D), 128, 9, True),
        ((P, D), 127, 9, False),  # short
        ((P, D), 500, 1, False),  # nothing left to decode
        ((P,), 500, 9, False),
        ((D,), 500, 9, False),
        ((P, C), 500, 9, False),  # colocated takes no handoffs
        ((view("p", Role.PREFILL, STARTING), D), 500, 9, False),
        ((view("p", Role.PREFILL, DRAINING), D), 500, 9, False),
        ((P, view("d", state=STARTING)), 500, 9, False),
        ((view("p", Role.PREFILL, max_context=300), D), 300, 9, False),  # does not fit it
        ((view("p", Role.PREFILL, max_context=301), D), 300, 9, True),
    ],
)
def test_whether_to_disaggregate(
    views: tuple[InstanceView, ...], prompt: int, max_tokens: int, disaggregate: bool
) -> None:
    try:
        placement = place(prompt, max_tokens, snapshot(*views), 128)
    except Unavailable:
        assert not disaggregate
    else:
        assert (placement.prefill is not None) is disaggregate


def test_from_zero_even_one_token_is_handed_off() -> None:
    assert place(1, 9, snapshot(P, D), disaggregate_from=0) == Placement("d", "p")


def test_who_writes_without_a_handoff() -> None:
    assert place(5, 9, snapshot(P, D), 128) == Placement("d", None)
    assert place(200, 9, snapshot(P, C), 128) == Placement("c", None)
    busy = view("d", pending=(3, 0))
    assert place(5, 9, snapshot(busy, C), 128) == Placement("c", None)
    # A handoff needs a decode instance, however idle the colocated one is.
    assert place(200, 9, snapshot(P, busy, C), 128) == Placement("d", "p")


def test_the_least_loaded_is_chosen() -> None:
    few, many = view("few", pending=(1, 0)), view("many", pending=(2, 0))
    assert place(5, 9, snapshot(many, few), 128).decode == "few"
    short = view("short", Role.PREFILL, pending=(9, 100))
    long = view("long", Role.PREFILL, pending=(1, 5000))
    assert place(200, 9, snapshot(long, short, D), 128).prefill == "short"
    # Who has a prompt to compute is busy, too, when it has to read one.
    reading = view("reading", pending=(1, 500))
    assert place(5, 9, snapshot(reading, few), 128).decode == "few"
    full, empty = view("full", free=0), view("empty", free=10)
    assert place(5, 9, snapshot(full, empty), 128).decode == "empty"


def test_scores_are_shares() -> None:
    for score in (lambda view: score_prefill(view, 0), score_decode):
        assert score(view("a")) == 1
        assert 0 < score(view("a", pending=(1000, 10**6), free=0)) < 0.01
    assert score_prefill(view("a"), 100) == score_prefill(view("a", pending=(1, 100)), 0)
    unknown = InstanceView(instance("a"), READY, Load(), Pending())
    assert score_decode(unknown) == 1


def decoders_of(policy: PlacementPolicy, *views: InstanceView) -> list[str]:
    return [place(5, 9, snapshot(*views), 128, turn, policy=policy).decode for turn in range(6)]


def test_equals_take_turns() -> None:
    views = [view("a"), view("b"), view("c", pending=(1, 0))]
    assert decoders_of(PlacementPolicy.LEAST_LOADED, *views) == ["a", "b"] * 3


def test_round_robin_takes_turns_whatever_the_load() -> None:
    views = [view("a", pending=(9, 0)), view("b"), view("c", free=0)]
    assert decoders_of(PlacementPolicy.ROUND_ROBIN, *views) == ["a", "b", "c"] * 2


def test_random_is_even_repeatable_and_apart_for_the_two_legs() -> None:
    cluster = snapshot(
        *(view(f"d{i}", pending=(9 * i, 0)) for i in range(2)),
        *(view(f"p{i}", Role.PREFILL, pending=(i, 5000 * i)) for i in range(2)),
    )

    def placed(turn: int) -> Placement:
        return place(200, 9, cluster, 128, turn, policy=PlacementPolicy.RANDOM)

    placements = [placed(turn) for turn in range(400)]
    assert placements == [placed(turn) for turn in range(400)]
    pairs = Counter(placements)
    assert len(pairs) == 4 and min(pairs.values()) > 60  # 100 of each, more or less


@pytest.mark.parametrize("policy", PlacementPolicy)
def test_every_policy_keeps_to_those_that_may(policy: PlacementPolicy) -> None:
    cluster = snapshot(
        view("ok"),
        view("avoided"),
        view("small", max_context=150),
        view("starting", state=STARTING),
        view("p", Role.PREFILL),
        view("leaving", Role.PREFILL, DRAINING),
    )
    for turn in range(50):
        placement = place(200, 9, cluster, 128, turn, frozenset({"avoided"}), policy)
        assert placement == Placement("ok", "p")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (snapshot(was_ready=False), "the cluster is starting"),
        (snapshot(P, was_ready=False), "the cluster is starting"),
        (snapshot(view("d", state=STARTING), was_ready=False), "the cluster is starting"),
        (snapshot(P), "the last one has gone"),
        (snapshot(view("d", state=DRAINING)), "start or drain"),
    ],
)
def test_nobody_is_there(state: Snapshot, reason: str) -> None:
    with pytest.raises(Unavailable, match=reason):
        place(200, 9, state, 128)


def test_what_fits_nobody_is_the_clients_error() -> None:
    small, large = view("s", max_context=100), view("l", max_context=200)
    assert place(90, 60, snapshot(small, large), 128).decode == "l"
    with pytest.raises(InvalidArgument, match=r"201 tokens do not fit: .* holds 200"):
        place(190, 11, snapshot(small, large), 128)


def test_a_decode_instance_that_is_too_small_gets_no_handoff() -> None:
    small, large = view("s", max_context=150), view("l", Role.COLOCATED, max_context=300)
    assert place(140, 60, snapshot(P, small, large), 128) == Placement("l", None)


@pytest.mark.parametrize(("policy", "counts"), [("round_robin", [2, 2]), ("least_loaded", [4, 0])])
async def test_a_router_places_as_it_is_told(
    start_router: StartRouter, policy: str, counts: list[int]
) -> None:
    cluster = await start_router(decode=1, placement=policy)
    full = FakeWorker(Role.DECODE)
    full.load.blocks_free = 0
    await cluster.add(full)
    for _ in range(4):
        await collect(cluster.stub.Generate(generate_request(max_tokens=2), timeout=5))
    assert [len(worker.starts) for worker in cluster.workers] == counts


def known_rates(
    token_s: float = 0.001, step_s: float = 0.01, handoff_s: float = 0.0, answer: int = 10
) -> Rates:
    """As learned from instances that are just so fast."""
    rates = Rates()
    for n in range(1, ENOUGH + 1):
        rates.saw_prefill(100 * n, 0, 100 * n * token_s)
        rates.saw_decode(n, answer, step_s)
        rates.saw_handoff("p", "d", 100, 100 * handoff_s)
    return rates


@pytest.mark.parametrize("policy", [PlacementPolicy.LOCAL_PREFIX, PlacementPolicy.COST])
@pytest.mark.parametrize("rates", [Rates(), known_rates()], ids=["unknown", "known"])
def test_a_prompt_goes_where_it_is_cached_unless_too_much_waits(
    policy: PlacementPolicy, rates: Rates
) -> None:
    idle = view("idle", Role.PREFILL)
    for waiting, expected in ((300, "has"), (700, "idle")):
        cluster = snapshot(view("has", Role.PREFILL, pending=(1, waiting)), idle, D)
        assert place(1000, 9, cluster, 0, policy=policy, rates=rates, has=512).prefill == expected
        blind = place(1000, 9, cluster, 0, rates=rates, has=512)
        assert blind.prefill == "idle", "least_loaded does not look at caches"


def test_a_short_uncached_rest_is_not_handed_over() -> None:
    assert place(1000, 9, snapshot(P, D), 128, d=900) == Placement("d", None)
    assert place(1000, 9, snapshot(P, D), 128, d=800) == Placement("d", "p")
    assert place(1000, 9, snapshot(P, D), 128, p=900) == Placement("d", "p")


def test_cost_weighs_both_legs_and_what_lies_between() -> None:
    policy = PlacementPolicy.COST
    cluster = snapshot(P, view("busy", pending=(20, 0)), view("idle"))
    rates = Rates()
    for n in range(1, ENOUGH + 1):
        rates.saw_prefill(100 * n, 0, 0.1 * n)
        rates.saw_decode(n, 50, 0.01 + 0.001 * n)
    assert place(500, 99, cluster, 0, policy=policy, rates=rates).decode == "idle"
    # Twenty neighbours cost 50 steps 20 ms each. What is cached on the busy one need not be
    # handed over, which is worth more only if the line is slow.
    for handoff_s, expected in ((0.0, "idle"), (0.01, "busy")):
        for _ in range(100):
            rates.saw_handoff("p", "busy", 100, 100 * handoff_s)
            rates.saw_handoff("p", "idle", 100, 100 * handoff_s)
        placement = place(500, 99, cluster, 0, policy=policy, rates=rates, busy=400)
        assert placement == Placement(expected, "p")


@pytest.mark.parametrize(
    ("waiting", "tpot_slo_s", "deflects"),
    [
        (500, 0.0, False),  # the prefill instance is in time
        (5000, 0.0, True),
        (5000, 0.05, True),  # a step of 10 ms and a chunk of 30 keep it
        (5000, 0.03, False),  # they do not
    ],
)
def test_a_burst_is_deflected(waiting: int, tpot_slo_s: float, deflects: bool) -> None:
    reader = view("p", Role.PREFILL, pending=(5, waiting))
    writer = view("d", pending=(3, 0), max_gap_s=0.03)
    rules = Rules(0, PlacementPolicy.COST, ttft_slo_s=1.0, tpot_slo_s=tpot_slo_s)
    demand = Demand(400, 9)
    assert should_deflect(demand, [reader], [writer], rules, known_rates()) is deflects
    placement = place_demand(demand, snapshot(reader, writer), rules, known_rates())
    assert placement == Placement("d", None if deflects else "p")


def test_without_objective_or_knowledge_nothing_is_deflected() -> None:
    reader, demand = view("p", Role.PREFILL, pending=(9, 9000)), Demand(400, 9)
    assert not should_deflect(demand, [reader], [D], Rules(), known_rates())
    assert not should_deflect(demand, [reader], [D], Rules(ttft_slo_s=0.1), Rates())


def test_predictions_add_up() -> None:
    rates = known_rates(handoff_s=0.0001)
    reader = view("p", Role.PREFILL, pending=(2, 1000))
    apart = predict_pair(Demand(500, 5, {"p": 100}), reader, D, rates)
    assert apart.wait_s == pytest.approx(1.0, rel=1e-3)
    assert apart.ttft_s == pytest.approx(1.0 + 0.4 + 0.05, rel=1e-3)
    assert apart.total_s == pytest.approx(apart.ttft_s + 5 * 0.01, rel=1e-3)
    alone = predict_here(Demand(500, 5), view("d", max_gap_s=0.03), rates)
    assert (alone.wait_s, alone.ttft_s) == (0.0, pytest.approx(0.5, rel=1e-3))
    beside = predict_here(Demand(500, 5), view("d", pending=(3, 0), max_gap_s=0.03), rates)
    assert beside.ttft_s == pytest.approx(0.5 * (1 + 0.01 / 0.03), rel=1e-3)


def test_a_burst_spreads_though_nobody_has_reported_yet() -> None:
    """Each request counts as soon as it is placed: what a heartbeat says is old."""
    rates, pending = known_rates(), dict.fromkeys(("p0", "p1", "p2"), 0)
    for turn in range(9):
        readers = [
            view(name, Role.PREFILL, pending=(tokens // 500, tokens))
            for name, tokens in pending.items()
        ]
        cluster = snapshot(*readers, D)
        placed = place(500, 9, cluster, 0, turn, policy=PlacementPolicy.COST, rates=rates)
        assert placed.prefill is not None
        pending[placed.prefill] += 500
    assert set(pending.values()) == {1500}


def test_too_long_a_wait_and_too_near_a_deadline_are_refused() -> None:
    reader = view("p", Role.PREFILL, pending=(9, 9000))
    predicted = predict_pair(Demand(400, 9), reader, D, known_rates())
    check_in_time(predicted, max_wait_s=10, left_s=None)
    check_in_time(predicted, max_wait_s=10, left_s=10)
    with pytest.raises(ResourceExhausted, match=r"would wait 9.0 s, the limit is 4 s") as refused:
        check_in_time(predicted, max_wait_s=4, left_s=None)
    assert refused.value.retry_after_s == pytest.approx(5, rel=1e-2)
    with pytest.raises(ResourceExhausted, match=r"would take 9.4 s, the deadline is in 2.0 s"):
        check_in_time(predicted, max_wait_s=10, left_s=2)
    # Trying again helps nobody whose time is too short for the prompt alone.
    with pytest.raises(DeadlineExceeded, match=r"the deadline is in 0.1 s"):
        check_in_time(predicted, max_wait_s=10, left_s=0.1)
