"""The requests inside the router, and the life of each as a table.

QUEUED → PREFILLING → HANDING_OFF → DECODING → DONE | FAILED | ABORTED. A prompt that is read
where the answer is written skips HANDING_OFF; one whose instance failed is QUEUED again.
Each request reaches exactly one terminal state.
Pure data; written by ``serving`` and ``dispatch``, read by the status page and the metrics.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from engine.errors import IllegalTransition
from services.runtime.errors import Aborted, ServiceError


class RequestState(Enum):
    """Where a request is."""

    QUEUED = auto()
    PREFILLING = auto()
    HANDING_OFF = auto()
    DECODING = auto()
    DONE = auto()
    FAILED = auto()
    ABORTED = auto()


class RequestEvent(Enum):
    """What may happen to a request."""

    DISPATCH = auto()  # both legs have their orders
    FIRST_TOKEN = auto()  # the first token is out, its KV may still be in flight
    JOIN = auto()  # the decode instance goes on alone
    RETRY = auto()  # the attempt failed, the request goes on
    FINISH = auto()
    FAIL = auto()
    ABORT = auto()


_S, _E = RequestState, RequestEvent
_ENDS = {_E.FAIL: _S.FAILED, _E.ABORT: _S.ABORTED}
REQUEST_TABLE: Mapping[RequestState, Mapping[RequestEvent, RequestState]] = {
    _S.QUEUED: {_E.DISPATCH: _S.PREFILLING, **_ENDS},
    _S.PREFILLING: {
        _E.FIRST_TOKEN: _S.HANDING_OFF,
        _E.JOIN: _S.DECODING,
        _E.FINISH: _S.DONE,  # the first token ended the answer
        _E.RETRY: _S.QUEUED,
        **_ENDS,
    },
    _S.HANDING_OFF: {
        _E.JOIN: _S.DECODING,
        _E.FINISH: _S.DONE,
        _E.RETRY: _S.QUEUED,
        **_ENDS,
    },
    _S.DECODING: {_E.FINISH: _S.DONE, _E.RETRY: _S.QUEUED, **_ENDS},
    _S.DONE: {},
    _S.FAILED: {},
    _S.ABORTED: {},
}
TERMINAL = frozenset(state for state, events in REQUEST_TABLE.items() if not events)
WAITING = frozenset({RequestState.QUEUED, RequestState.PREFILLING})


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request on its way."""

    request_id: str
    num_prompt_tokens: int
    state: RequestState = RequestState.QUEUED
    end: Callable[[ServiceError], None] | None = None
    """Ends it from outside; there once it was dispatched."""

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL

    def advance(self, event: RequestEvent) -> None:
        """Move by the table.

        Raises:
            IllegalTransition: the table does not allow ``event`` in this state.
        """
        after = REQUEST_TABLE[self.state].get(event)
        if after is None:
            raise IllegalTransition(f"request {self.request_id}: {event.name} in {self.state.name}")
        self.state = after


class RequestTable:
    """All requests that have not ended."""

    def __init__(self) -> None:
        self._records: dict[str, RequestRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        assert record.request_id not in self._records
        self._records[record.request_id] = record

    def remove(self, record: RequestRecord) -> None:
        del self._records[record.request_id]

    def abort(self, request_id: str) -> bool:
        """End a request by its id; False: there is no such request."""
        record = self._records.get(request_id)
        if record is None:
            return False
        if record.end is not None:
            record.end(Aborted("the request was aborted"))
        return True

    def end_all(self, error: ServiceError) -> None:
        """End all requests with ``error``."""
        for record in self._records.values():
            if record.end is not None:
                record.end(error)

    def count(self) -> tuple[int, int]:
        """How many have a token (running), and how many have none yet (waiting)."""
        waiting = sum(record.state in WAITING for record in self._records.values())
        return len(self._records) - waiting, waiting
