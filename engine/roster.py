"""Who is here: the sequences of one engine, in line or with blocks, in rank order.

Keeps lists; decides nothing and knows nothing of blocks or steps. Owned by ``scheduler``.
"""

from bisect import insort

from engine.beams import Beams
from engine.errors import IntegrityError, InvalidRequest
from engine.order import Rank, rank
from engine.request import Purpose, Request, Sequence, SequenceState

_IN_LINE = frozenset({SequenceState.WAITING})
_WITH_BLOCKS = frozenset(
    {SequenceState.PREFILLING, SequenceState.PENDING_DECODE, SequenceState.DECODING}
)


class Roster:
    """Every sequence that has not ended, by id and by rank."""

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._ranks: dict[Sequence, Rank] = {}
        self._beams: dict[Sequence, Beams] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._num_arrivals = 0

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Those in line for blocks, the first in rank first."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Those with blocks, the first in rank first."""
        return tuple(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def get(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def beams_of(self, sequence: Sequence) -> Beams | None:
        """The search that it is a beam of."""
        return self._beams.get(sequence)

    def goes_before(self, sequence: Sequence, other: Sequence) -> bool:
        return self._ranks[sequence] < self._ranks[other]

    def decodes(self) -> list[Sequence]:
        return [s for s in self._running if s.state is SequenceState.DECODING]

    def prefills(self) -> list[Sequence]:
        """Those that may be computed: a SOURCE only once it is granted."""
        return [s for s in self._running if s.state is SequenceState.PREFILLING and s.granted]

    def num_ungranted(self) -> int:
        """SOURCEs that have blocks and wait for their target."""
        return sum(s.state is SequenceState.PREFILLING and not s.granted for s in self._running)

    def num_slots_taken(self) -> int:
        """Sequences with blocks that decode here, now or later, and their forks."""
        return sum(s.num_slots for s in self._running)

    def enter(self, request: Request, purpose: Purpose, now_s: float) -> Sequence:
        """A new sequence, at its place in line.

        Raises:
            InvalidRequest: its id is in use.
        """
        if request.request_id in self._by_id:
            raise InvalidRequest("request_id", f"{request.request_id} is in use: take a new one")
        sequence = Sequence(
            request,
            purpose,
            now_s,
            granted=purpose is not Purpose.SOURCE,
            output_token_ids=list(request.output_token_ids),
            num_unborn_forks=request.sampling.num_candidates - 1,
        )
        if request.sampling.beam_search is not None and purpose is not Purpose.SOURCE:
            self._beams[sequence] = Beams(request)
        self._register(sequence)
        self._insert(self._waiting, sequence)
        return sequence

    def fork(self, sequence: Sequence, request: Request) -> Sequence:
        """``request`` begins with what ``sequence`` has computed; it has blocks at once."""
        fork = Sequence(
            request,
            sequence.purpose,
            sequence.arrival_s,
            state=sequence.state,
            output_token_ids=list(sequence.output_token_ids),
            num_computed_tokens=sequence.num_computed_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
        )
        if (beams := self._beams.get(sequence)) is not None:
            self._beams[fork] = beams
        self._register(fork)
        self._insert(self._running, fork)
        return fork

    def _register(self, sequence: Sequence) -> None:
        request = sequence.request
        self._by_id[request.request_id] = sequence
        self._ranks[sequence] = rank(request.priority, sequence.arrival_s, self._num_arrivals)
        self._num_arrivals += 1

    def start(self, sequence: Sequence) -> None:
        """It got blocks."""
        self._waiting.remove(sequence)
        self._insert(self._running, sequence)

    def requeue(self, sequence: Sequence) -> None:
        """It lost its blocks; it keeps its place."""
        self._running.remove(sequence)
        self._insert(self._waiting, sequence)

    def forget(self, sequence: Sequence) -> bool:
        """It has ended. True when it had blocks."""
        had_blocks = sequence in self._running
        (self._running if had_blocks else self._waiting).remove(sequence)
        del self._by_id[sequence.request_id]
        del self._ranks[sequence]
        self._beams.pop(sequence, None)
        return had_blocks

    def check_integrity(self) -> None:
        """
        Raises:
            IntegrityError: lists, ranks and states disagree.
        """
        for members, states in ((self._waiting, _IN_LINE), (self._running, _WITH_BLOCKS)):
            if any(sequence.state not in states for sequence in members):
                raise IntegrityError("a sequence stands where its state does not belong")
            ranks = [self._ranks[sequence] for sequence in members]
            if ranks != sorted(ranks):
                raise IntegrityError("sequences are not in rank order")
        if any(sequence.num_computed_tokens for sequence in self._waiting):
            raise IntegrityError("a sequence without blocks claims to be computed")
        everyone = {s.request_id: s for s in (*self._waiting, *self._running)}
        if everyone != self._by_id or len(everyone) != self.num_waiting + self.num_running:
            raise IntegrityError("a sequence is lost, or listed twice")
        if not self._beams.keys() <= self._ranks.keys() == set(everyone.values()):
            raise IntegrityError("ranks and sequences disagree")

    def _insert(self, members: list[Sequence], sequence: Sequence) -> None:
        insort(members, sequence, key=self._ranks.__getitem__)
