"""What is remembered of the last requests, and who is told of each one that ends.

Nothing is made of a request before somebody asks, so remembering costs a reference. Knows no
format. Fed by ``serving``, asked by ``observing``.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from services.router.timeline import Marks
from services.router.trace import Origin, Trace, layers_of, spans_of


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended; ``end_s`` since it came."""

    request_id: str
    num_prompt_tokens: int
    marks: Marks
    origin: Origin
    outcome: str
    end_s: float
    received_unix_s: float


class Traces:
    """A bounded memory of requests.

    Args:
        model: what they were asked of.
        capacity: the oldest of more is forgotten; 0: nothing is remembered.
        tell: told of every trace, or None.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        model: str,
        capacity: int,
        tell: Callable[[Trace], None] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._model = model
        self._capacity = capacity
        self._tell = tell
        self._wall_clock = wall_clock
        self._ended: OrderedDict[str, Ended] = OrderedDict()

    @property
    def are_wanted(self) -> bool:
        """Whether instances should report what only traces show."""
        return self._capacity > 0 or self._tell is not None

    def end(
        self,
        request_id: str,
        num_prompt_tokens: int,
        marks: Marks,
        origin: Origin,
        outcome: str,
        end_s: float,
    ) -> None:
        """A request has ended, ``end_s`` after it came."""
        if not self.are_wanted:
            return
        received_unix_s = self._wall_clock() - end_s
        ended = Ended(request_id, num_prompt_tokens, marks, origin, outcome, end_s, received_unix_s)
        if self._tell is not None:
            self._tell(self._trace(ended))
        self._ended[request_id] = ended
        while len(self._ended) > self._capacity:
            self._ended.popitem(last=False)

    def find(self, request_id: str) -> Trace | None:
        """The trace of a request that ended not long ago."""
        ended = self._ended.get(request_id)
        return None if ended is None else self._trace(ended)

    def _trace(self, ended: Ended) -> Trace:
        return Trace(
            ended.request_id,
            self._model,
            ended.origin,
            ended.outcome,
            ended.received_unix_s,
            spans_of(ended.marks, ended.end_s, ended.num_prompt_tokens),
            layers_of(ended.marks),
        )
