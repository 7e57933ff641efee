"""The sequence table, and the scheduler walking through it."""

from collections.abc import Callable

import pytest

from engine.config import EngineConfig
from engine.errors import IllegalTransition
from engine.kv.manager import KvManager
from engine.plan import StepPlan, StepResult
from engine.request import (
    SEQUENCE_TABLE,
    Purpose,
    Request,
    SamplingParams,
    Sequence,
    SequenceEvent,
    SequenceState,
)
from engine.scheduler import Scheduler

CELLS = [(state, event) for state in SequenceState for event in SequenceEvent]


def sequence_in(state: SequenceState) -> Sequence:
    return Sequence(Request("r", (1, 2)), Purpose.LOCAL, 0.0, state)


@pytest.mark.parametrize(("state", "event"), CELLS)
def test_every_cell_moves_or_raises(state: SequenceState, event: SequenceEvent) -> None:
    sequence = sequence_in(state)
    after = SEQUENCE_TABLE[state].get(event)
    if after is None:
        with pytest.raises(IllegalTransition, match=f"{event.name} in {state.name}"):
            sequence.advance(event)
        assert sequence.state is state
    else:
        sequence.advance(event)
        assert sequence.state is after


def test_every_state_is_reached_and_every_sequence_may_end() -> None:
    assert set(SEQUENCE_TABLE) == set(SequenceState)
    reached = {after for row in SEQUENCE_TABLE.values() for after in row.values()}
    assert reached == set(SequenceState)
    for state, row in SEQUENCE_TABLE.items():
        ends = row.get(SequenceEvent.FINISH)
        assert ends is (None if state is SequenceState.FINISHED else SequenceState.FINISHED)
    assert not SEQUENCE_TABLE[SequenceState.FINISHED]


# ---- the scheduler, from every state a sequence can rest in ---------------------------------

PROMPT = tuple(range(40))
REQUEST = Request("r", PROMPT, SamplingParams(max_tokens=50))


def new_scheduler() -> Scheduler:
    kv = KvManager(8, 16, "m")
    return Scheduler(EngineConfig(token_budget=64, max_decode_sequences=4), kv, [2], 120)


def step(scheduler: Scheduler) -> StepPlan:
    plan, _ = scheduler.plan(32)
    scheduler.apply(plan, StepResult({r.request_id: 7 for r in plan.sequences if r.samples}))
    return plan


def waiting(scheduler: Scheduler) -> None:
    scheduler.add(REQUEST, Purpose.LOCAL, 0.0)


def ungranted(scheduler: Scheduler) -> None:
    scheduler.add(REQUEST, Purpose.SOURCE, 0.0)
    step(scheduler)


def prefilling(scheduler: Scheduler) -> None:
    waiting(scheduler)
    step(scheduler)


def decoding(scheduler: Scheduler) -> None:
    prefilling(scheduler)
    step(scheduler)


def reserved(scheduler: Scheduler) -> None:
    assert scheduler.reserve(REQUEST, 0.0) is not None


def joined(scheduler: Scheduler) -> None:
    reserved(scheduler)
    scheduler.join("r", 7)


def sent(scheduler: Scheduler) -> None:
    ungranted(scheduler)
    scheduler.grant("r")
    step(scheduler)
    step(scheduler)


def preempted(scheduler: Scheduler) -> None:
    scheduler.add(Request("first", PROMPT[:30], REQUEST.sampling), Purpose.LOCAL, 0.0)
    waiting(scheduler)
    while not scheduler.stats().num_preemptions:
        step(scheduler)


def awaiting_reservation(scheduler: Scheduler) -> None:
    scheduler.add(Request("first", tuple(range(500, 600)), REQUEST.sampling), Purpose.LOCAL, 0.0)
    step(scheduler)
    assert scheduler.reserve(REQUEST, 0.0) is None


STATES = {
    waiting: (SequenceState.WAITING, True),
    ungranted: (SequenceState.PREFILLING, False),
    prefilling: (SequenceState.PREFILLING, True),
    decoding: (SequenceState.DECODING, True),
    reserved: (SequenceState.PENDING_DECODE, True),
    joined: (SequenceState.DECODING, True),
    sent: (SequenceState.PENDING_DECODE, True),
    preempted: (SequenceState.WAITING, True),
    awaiting_reservation: (SequenceState.WAITING, True),
}
Enter = Callable[[Scheduler], None]


def state_of(scheduler: Scheduler) -> tuple[SequenceState, bool]:
    sequence = scheduler._roster.get("r")
    assert sequence is not None
    return sequence.state, sequence.granted


@pytest.mark.parametrize("enter", STATES, ids=lambda f: f.__name__)
def test_finish_from_every_state_frees_everything_and_may_be_repeated(enter: Enter) -> None:
    scheduler = new_scheduler()
    enter(scheduler)
    assert state_of(scheduler) == STATES[enter]
    for _ in range(2):
        scheduler.finish("r")
        scheduler.check_integrity()
    scheduler.finish("first")
    assert scheduler.kv.stats().held == 0
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert not scheduler.has_work()


@pytest.mark.parametrize("enter", STATES, ids=lambda f: f.__name__)
def test_a_crash_in_every_state_frees_everything(enter: Enter) -> None:
    scheduler = new_scheduler()
    enter(scheduler)
    scheduler.plan(32)
    failed = scheduler.fail(["r", "first", "never seen"], "crashed")
    assert "r" in {event.request_id for event in failed}
    scheduler.check_integrity()
    assert scheduler.kv.stats().held == 0
    assert scheduler.fail(["r"], "again") == []


@pytest.mark.parametrize("enter", STATES, ids=lambda f: f.__name__)
def test_join_is_for_those_whose_prompt_may_land(enter: Enter) -> None:
    scheduler = new_scheduler()
    enter(scheduler)
    if enter is reserved:
        scheduler.join("r", 7)
        assert state_of(scheduler)[0] is SequenceState.DECODING
    else:
        with pytest.raises(IllegalTransition, match="no reservation"):
            scheduler.join("r", 7)
        assert state_of(scheduler) == STATES[enter]


@pytest.mark.parametrize("enter", STATES, ids=lambda f: f.__name__)
def test_quarantine_is_for_those_who_are_written_from_outside(enter: Enter) -> None:
    scheduler = new_scheduler()
    enter(scheduler)
    if enter is reserved:
        locked = scheduler.quarantine("r")
        assert scheduler.kv.stats().quarantined == len(locked) == 3
        assert scheduler.quarantine("r") == ()
    else:
        with pytest.raises(IllegalTransition, match="no remote writer"):
            scheduler.quarantine("r")
        assert state_of(scheduler) == STATES[enter]
    scheduler.check_integrity()


def test_messages_for_the_ended_are_ignored() -> None:
    scheduler = new_scheduler()
    scheduler.grant("gone")
    scheduler.join("gone", 7)
    scheduler.finish("gone")
    assert scheduler.quarantine("gone") == ()
    assert not scheduler.has_work()
