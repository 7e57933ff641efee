"""The handoff protocol as a table: role -> state -> event -> state. No I/O, no time.

Walked by ``handoff.source`` and ``handoff.target``; drawn and iterated by the tests.

    source  OFFERED --grant--> GRANTED --send--> SENDING --finish--> SENT --land--> RELEASED
    target  EXPECTED --grant--> RESERVED --receive--> RECEIVING --land--> LANDED
    both    any live state --fail--> FAILED
            any live state --cancel--> CANCELLING --drain--> CANCELLED

Terminal states are idempotent: whatever ends a handoff may be said again and changes nothing.
Blocks may be reused only when a handoff is in a terminal state *and* nothing of it is in flight.
"""

from collections.abc import Mapping
from enum import Enum, auto

from kvtransfer.errors import IllegalTransition


class Role(Enum):
    """The two ends of a handoff."""

    SOURCE = auto()
    TARGET = auto()


class HandoffState(Enum):
    """Where one end of a handoff stands."""

    OFFERED = auto()
    GRANTED = auto()
    SENDING = auto()
    SENT = auto()
    RELEASED = auto()
    EXPECTED = auto()  # the offer, the request that wants it, or both are here
    RESERVED = auto()
    RECEIVING = auto()
    LANDED = auto()
    CANCELLING = auto()
    CANCELLED = auto()
    FAILED = auto()


class HandoffEvent(Enum):
    """What may happen to one end of a handoff."""

    GRANT = auto()  # the target has blocks for it
    REFUSE = auto()  # the target wants nothing of it
    SEND = auto()  # source: one more frame is read from the blocks
    FINISH = auto()  # source: every frame is written and the first token is known
    RECEIVE = auto()  # target: one more frame is written to the blocks
    LAND = auto()  # everything is in the target's blocks
    FAIL = auto()
    CANCEL = auto()
    DRAIN = auto()  # cancelled, and nothing is in flight any more


_S, _E = HandoffState, HandoffEvent
_StateTable = Mapping[HandoffState, Mapping[HandoffEvent, HandoffState]]

_STOP = {_E.FAIL: _S.FAILED, _E.CANCEL: _S.CANCELLING}
_ENDINGS = (_E.REFUSE, _E.LAND, _E.FAIL, _E.CANCEL, _E.DRAIN)
_BOTH: _StateTable = {
    _S.CANCELLING: {
        _E.CANCEL: _S.CANCELLING,
        _E.FAIL: _S.CANCELLING,
        _E.DRAIN: _S.CANCELLED,
    },
    _S.CANCELLED: dict.fromkeys(_ENDINGS, _S.CANCELLED),
    _S.FAILED: dict.fromkeys(_ENDINGS, _S.FAILED),
}

HANDOFF_TABLE: Mapping[Role, _StateTable] = {
    Role.SOURCE: {
        _S.OFFERED: {_E.GRANT: _S.GRANTED, _E.REFUSE: _S.FAILED, **_STOP},
        _S.GRANTED: {_E.SEND: _S.SENDING, _E.FINISH: _S.SENT, **_STOP},
        _S.SENDING: {_E.SEND: _S.SENDING, _E.FINISH: _S.SENT, **_STOP},
        _S.SENT: {_E.LAND: _S.RELEASED, **_STOP},
        _S.RELEASED: dict.fromkeys(_ENDINGS, _S.RELEASED),
        **_BOTH,
    },
    Role.TARGET: {
        _S.EXPECTED: {_E.GRANT: _S.RESERVED, _E.REFUSE: _S.FAILED, **_STOP},
        _S.RESERVED: {_E.RECEIVE: _S.RECEIVING, _E.LAND: _S.LANDED, **_STOP},
        _S.RECEIVING: {_E.RECEIVE: _S.RECEIVING, _E.LAND: _S.LANDED, **_STOP},
        _S.LANDED: dict.fromkeys(_ENDINGS, _S.LANDED),
        **_BOTH,
    },
}

TERMINAL = frozenset({_S.RELEASED, _S.LANDED, _S.CANCELLED, _S.FAILED})
STOPPED = frozenset({_S.CANCELLING, _S.CANCELLED, _S.FAILED})


def advance(role: Role, state: HandoffState, event: HandoffEvent) -> HandoffState:
    """The state after ``event``.

    Raises:
        IllegalTransition: the table does not allow ``event`` in ``state``.
    """
    after = HANDOFF_TABLE[role].get(state, {}).get(event)
    if after is None:
        raise IllegalTransition(f"{role.name} handoff: {event.name} in {state.name}")
    return after
