"""Puts a step together: whose turn it is, who gets blocks, which tokens are computed.

Follows the pure policies of ``order`` over the roster. Knows counts and blocks; what a result
means for its sequences is the scheduler's. Owned and called by ``scheduler``, under its lock.
"""

from dataclasses import dataclass

from engine.admission import Admission
from engine.config import EngineConfig
from engine.kv.manager import KvManager
from engine.order import Schedule, Turn, chunk_ends, next_turn, prefill_room
from engine.plan import Fork, Picked, ScheduledSequence, StepPlan
from engine.request import Sequence, forks_of
from engine.roster import Roster


@dataclass(frozen=True, slots=True)
class Composition:
    """Who is in a step."""

    decodes: tuple[Sequence, ...] = ()
    chunks: tuple[tuple[Sequence, int], ...] = ()
    """Prefills, and where each one's chunk ends."""

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return (*self.decodes, *(sequence for sequence, _ in self.chunks))


class Composer:
    """Composes one step after the other."""

    def __init__(
        self, roster: Roster, admission: Admission, kv: KvManager, config: EngineConfig
    ) -> None:
        self._roster = roster
        self._admission = admission
        self._kv = kv
        self._config = config
        self._schedule = Schedule(config.schedule)
        self._num_prefill_steps = 0

    @property
    def chunks_ride_beside_decodes(self) -> bool:
        """A chunk of the next step delays the tokens of running answers."""
        return self._schedule is Schedule.DECODE_FIRST and bool(self._roster.decodes())

    def compose(self, prefill_limit_tokens: int) -> tuple[Composition, list[Picked]]:
        """The next step, perhaps empty, and who got blocks for it or ahead of it."""
        turn = next_turn(
            self._schedule,
            len(self._roster.decodes()),
            self._num_prefill_steps,
            self._config.max_consecutive_prefill_steps,
        )
        picked: list[Picked] = []
        if turn is Turn.PREFILLS:
            room = self._room(0, prefill_limit_tokens)
            picked = self._admission.pick(room)
            if chunks := self._chunks(room):
                self._num_prefill_steps += 1
                return Composition(chunks=chunks), picked
        self._num_prefill_steps = 0
        preempted = self._admission.grow_decodes()
        decodes = tuple(self._roster.decodes())
        if turn is not Turn.BOTH:
            return Composition(decodes), picked
        room = self._room(len(decodes), prefill_limit_tokens)
        # Who just lost its blocks must not take them back in the same breath.
        if not preempted:
            picked = self._admission.pick(room)
        return Composition(decodes, self._chunks(room)), picked

    def plan_of(self, step: int, composition: Composition) -> StepPlan:
        """The rows of a step, decodes first."""
        decodes = [self._row(s, s.num_tokens) for s in composition.decodes]
        chunks = [self._row(s, end) for s, end in composition.chunks]
        num_prefill_tokens = sum(len(row.token_ids) for row in chunks)
        return StepPlan(
            step, (*decodes, *chunks), len(decodes), num_prefill_tokens, self._kv.copies()
        )

    def _room(self, num_decodes: int, limit_tokens: int) -> int:
        return prefill_room(
            num_decodes, self._config.token_budget, limit_tokens, self._kv.block_size
        )

    def _chunks(self, room_tokens: int) -> tuple[tuple[Sequence, int], ...]:
        """The prefills that get a chunk in this step, and where it ends."""
        prefills = self._roster.prefills()[: self._config.max_prefill_batch]
        spans = [(s.num_computed_tokens, s.num_tokens) for s in prefills]
        ends = chunk_ends(spans, room_tokens, self._kv.block_size)
        return tuple(
            (sequence, end)
            for sequence, end in zip(prefills, ends, strict=True)
            if end > sequence.num_computed_tokens
        )

    def _row(self, sequence: Sequence, end: int) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        samples = end == sequence.num_tokens
        unborn = forks_of(sequence.request)[1:] if samples and sequence.num_unborn_forks else ()
        return ScheduledSequence(
            request_id=sequence.request_id,
            token_ids=_tokens_between(sequence, start, end),
            start=start,
            block_table=self._kv.block_table(sequence.request_id),
            samples=samples,
            sampling=sequence.request.sampling,
            forks=tuple(Fork(fork.request_id, fork.sampling) for fork in unborn),
            prompt_token_ids=sequence.request.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
        )


def _tokens_between(sequence: Sequence, start: int, end: int) -> tuple[int, ...]:
    """Without building the whole: a decode step wants one token of thousands."""
    num_prompt_tokens = sequence.num_prompt_tokens
    prompt = sequence.request.prompt_token_ids[start:end]
    output = sequence.output_token_ids[
        max(0, start - num_prompt_tokens) : max(0, end - num_prompt_tokens)
    ]
    return (*prompt, *output)
