"""The life of a request as a table."""

import pytest

from engine.errors import IllegalTransition
from services.router.request_table import (
    REQUEST_TABLE,
    TERMINAL,
    RequestEvent,
    RequestRecord,
    RequestState,
    RequestTable,
)
from services.runtime.errors import Aborted, ServiceError, Unavailable


@pytest.mark.parametrize("state", list(RequestState))
@pytest.mark.parametrize("event", list(RequestEvent))
def test_only_what_the_table_allows(state: RequestState, event: RequestEvent) -> None:
    record = RequestRecord("r", 1, state)
    after = REQUEST_TABLE[state].get(event)
    if after is None:
        with pytest.raises(IllegalTransition, match=f"{event.name} in {state.name}"):
            record.advance(event)
        assert record.state is state
    else:
        record.advance(event)
        assert record.state is after


def test_every_state_is_reachable_and_every_life_can_end() -> None:
    reached, todo = {RequestState.QUEUED}, [RequestState.QUEUED]
    while todo:
        for after in REQUEST_TABLE[todo.pop()].values():
            if after not in reached:
                reached.add(after)
                todo.append(after)
    assert reached == set(RequestState)
    assert {RequestState.DONE, RequestState.FAILED, RequestState.ABORTED} == TERMINAL
    for state in set(RequestState) - TERMINAL:
        assert {RequestEvent.FAIL, RequestEvent.ABORT} <= set(REQUEST_TABLE[state])


def test_counts_and_ends() -> None:
    table, heard = RequestTable(), list[ServiceError]()
    waiting = RequestRecord("w", 1)
    running = RequestRecord("r", 1, RequestState.DECODING, end=heard.append)
    for record in (waiting, running):
        table.add(record)
    assert table.count() == (1, 1)
    assert table.abort("r") and type(heard[-1]) is Aborted
    assert not table.abort("nobody")
    table.end_all(Unavailable("stopping"))
    assert str(heard[-1]) == "stopping"
    table.remove(running)
    assert table.count() == (0, 1)
