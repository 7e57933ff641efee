"""The order policy: ranks, room and chunk ends."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.order import (
    MAX_PRIORITY,
    PRIORITY_STEP_S,
    Schedule,
    Turn,
    chunk_ends,
    next_turn,
    prefill_room,
    rank,
)


def test_first_come_first_served_within_a_priority() -> None:
    assert rank(0, 1.0, 0) < rank(0, 2.0, 1)
    assert rank(0, 1.0, 0) < rank(0, 1.0, 1)


def test_lower_priority_numbers_go_first() -> None:
    assert rank(-1, 5.0, 9) < rank(0, 5.0, 1) < rank(1, 5.0, 0)


def test_waiting_is_worth_priority() -> None:
    waited = rank(3, 100.0, 0)
    assert rank(0, 100.0 + 3 * PRIORITY_STEP_S - 0.1, 1) < waited
    assert waited < rank(0, 100.0 + 3 * PRIORITY_STEP_S + 0.1, 2)


def test_no_priority_keeps_another_waiting_for_ever() -> None:
    longest_s = 2 * MAX_PRIORITY * PRIORITY_STEP_S
    assert rank(2**31 - 1, 0.0, 0) < rank(-(2**31), longest_s + 0.1, 1)


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.floats(0, 1000)), min_size=2, max_size=6),
    st.floats(1000, 2000),
)
def test_the_key_is_the_aged_priority_at_any_moment(
    waiting: list[tuple[int, float]], now_s: float
) -> None:
    def aged(priority: int, arrival_s: float) -> float:
        return priority - (now_s - arrival_s) / PRIORITY_STEP_S

    for one, other in itertools.combinations(waiting, 2):
        if abs(aged(*one) - aged(*other)) > 1e-6:
            assert (aged(*one) < aged(*other)) == (rank(*one, 0) < rank(*other, 0))


@pytest.mark.parametrize(
    ("schedule", "num_decodes", "num_prefill_steps", "turn"),
    [
        (Schedule.DECODE_FIRST, 0, 9, Turn.BOTH),
        (Schedule.DECODE_FIRST, 5, 9, Turn.BOTH),
        (Schedule.PREFILL_FIRST, 5, 0, Turn.PREFILLS),
        (Schedule.PREFILL_FIRST, 5, 2, Turn.PREFILLS),
        (Schedule.PREFILL_FIRST, 5, 3, Turn.DECODES),
        (Schedule.PREFILL_FIRST, 0, 3, Turn.PREFILLS),
    ],
)
def test_whose_turn_it_is(
    schedule: Schedule, num_decodes: int, num_prefill_steps: int, turn: Turn
) -> None:
    assert next_turn(schedule, num_decodes, num_prefill_steps, 3) is turn


@pytest.mark.parametrize(
    ("num_decodes", "limit", "room"),
    [(0, 1000, 64), (10, 1000, 54), (10, 30, 30), (10, 1, 16), (48, 1000, 16)],
)
def test_room_is_what_the_decodes_leave(num_decodes: int, limit: int, room: int) -> None:
    assert prefill_room(num_decodes, 64, limit, 16) == room


@pytest.mark.parametrize(
    ("spans", "room", "ends"),
    [
        ([(0, 100)], 1000, [100]),
        ([(0, 100)], 100, [100]),
        ([(0, 100)], 99, [96]),
        ([(0, 100)], 16, [16]),
        ([(0, 100)], 31, [16]),
        ([(96, 100)], 16, [100]),
        ([(0, 5)], 16, [5]),
        ([(0, 20), (0, 20)], 30, [20, 0]),
        ([(0, 20), (32, 100)], 40, [20, 48]),
        ([(0, 100), (0, 3)], 35, [32, 3]),
        ([(0, 100), (0, 4)], 35, [32, 0]),
        ([(0, 10), (0, 100), (0, 6)], 24, [10, 0, 6]),
        ([], 16, []),
    ],
)
def test_chunks_end_with_a_block_or_with_the_prompt(
    spans: list[tuple[int, int]], room: int, ends: list[int]
) -> None:
    assert chunk_ends(spans, room, 16) == ends


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 200)).map(
            lambda t: (t[0] * 16, t[0] * 16 + t[1])
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(16, 300),
)
def test_chunks_fit_the_room_and_the_first_always_gets_on(
    spans: list[tuple[int, int]], room: int
) -> None:
    ends = chunk_ends(spans, room, 16)
    taken = [end - start for (start, _), end in zip(spans, ends, strict=True)]
    assert min(taken) >= 0 and taken[0] > 0 and sum(taken) <= room
    for (_, stop), end in zip(spans, ends, strict=True):
        assert end == stop or end % 16 == 0
