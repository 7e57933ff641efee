"""The handoff table itself: which events it knows, and that its endings are endings."""

import pytest

from kvtransfer.errors import IllegalTransition
from kvtransfer.handoff.table import (
    HANDOFF_TABLE,
    STOPPED,
    TERMINAL,
    HandoffEvent,
    HandoffState,
    Role,
    advance,
)

_S, _E = HandoffState, HandoffEvent
CELLS = [(role, state, event) for role in Role for state in HANDOFF_TABLE[role] for event in _E]
GOOD_WAY = {
    Role.SOURCE: ([_E.GRANT, _E.SEND, _E.SEND, _E.FINISH, _E.LAND], _S.OFFERED, _S.RELEASED),
    Role.TARGET: ([_E.GRANT, _E.RECEIVE, _E.RECEIVE, _E.LAND], _S.EXPECTED, _S.LANDED),
}


@pytest.mark.parametrize("role", Role)
def test_the_good_way_leads_to_the_good_end(role: Role) -> None:
    events, state, end = GOOD_WAY[role]
    for event in events:
        state = advance(role, state, event)
    assert state is end


@pytest.mark.parametrize(("role", "state", "event"), CELLS)
def test_every_cell_is_a_state_of_the_role_or_raises(
    role: Role, state: HandoffState, event: HandoffEvent
) -> None:
    if event not in HANDOFF_TABLE[role][state]:
        with pytest.raises(IllegalTransition, match=f"{event.name} in {state.name}"):
            advance(role, state, event)
        return
    after = advance(role, state, event)
    assert after in HANDOFF_TABLE[role]
    if state in TERMINAL:
        assert after is state, "a terminal state is left"


@pytest.mark.parametrize("role", Role)
def test_every_state_that_is_not_terminal_can_be_stopped(role: Role) -> None:
    for state in HANDOFF_TABLE[role].keys() - TERMINAL:
        assert advance(role, state, _E.CANCEL) is _S.CANCELLING
        assert advance(role, state, _E.FAIL) in STOPPED


@pytest.mark.parametrize("role", Role)
def test_terminal_states_take_every_ending_again(role: Role) -> None:
    for state in HANDOFF_TABLE[role].keys() & TERMINAL:
        for event in (_E.LAND, _E.FAIL, _E.CANCEL, _E.DRAIN, _E.REFUSE):
            assert advance(role, state, event) is state


def test_the_roles_do_not_mix() -> None:
    with pytest.raises(IllegalTransition):
        advance(Role.SOURCE, _S.RECEIVING, _E.RECEIVE)
