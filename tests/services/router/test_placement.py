"""Placement: who may, who is better, who is next; and whether to use two instances at all."""

from collections import Counter
from typing import Any

import pytest

from services.router.membership import InstanceState, InstanceView, Load, Pending, Snapshot
from services.router.placement import (
    Placement,
    pick,
    place,
    score_decode,
    score_prefill,
    should_disaggregate,
)
from services.runtime.errors import InvalidArgument, Unavailable
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
    pending: tuple[int, int] = (0, 0),
    free: int = 10,
    **described: Any,
) -> InstanceView:
    load = Load(blocks_total=10, blocks_free=free)
    return InstanceView(instance(instance_id, role, **described), state, load, Pending(*pending))


def snapshot(*views: InstanceView, was_ready: bool = True) -> Snapshot:
    return Snapshot(views, was_ready)


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
    assert should_disaggregate(prompt, max_tokens, snapshot(*views), 128) is disaggregate


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
    full, empty = view("full", free=0), view("empty", free=10)
    assert place(5, 9, snapshot(full, empty), 128).decode == "empty"


def test_scores_are_shares() -> None:
    for score in (score_prefill, score_decode):
        assert score(view("a")) == 1
        assert 0 < score(view("a", pending=(1000, 10**6), free=0)) < 0.01
    unknown = InstanceView(instance("a"), READY, Load(), Pending())
    assert score_decode(unknown) == 1


def test_equals_take_turns() -> None:
    views = [view("a"), view("b"), view("c", pending=(1, 0))]
    assert [pick(views, score_decode, turn) for turn in range(4)] == ["a", "b", "a", "b"]


def test_round_robin_takes_turns_whatever_the_load() -> None:
    views = [view("a", pending=(9, 0)), view("b"), view("c", free=0)]
    policy = PlacementPolicy.ROUND_ROBIN
    picked = [pick(views, score_decode, turn, policy) for turn in range(6)]
    assert picked == ["a", "b", "c", "a", "b", "c"]


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
