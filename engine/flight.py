"""The step in flight, and what its result means for its sequences: tokens, endings, forks.

Blocks of a running forward are never given away: when a sequence of the step in flight ends, its
blocks are freed as that step is applied. Knows tokens and blocks, not who gets a turn. Owned and
called by ``scheduler``, under its lock.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Tokens

from engine.admission import Admission
from engine.beam_steps import BeamSteps
from engine.beams import Beams, Candidates
from engine.errors import IllegalTransition
from engine.kv.manager import KvManager
from engine.plan import (
    Computed,
    CutShort,
    EngineEvent,
    Failed,
    Sampled,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from engine.request import (
    FinishReason,
    Purpose,
    Request,
    Sequence,
    SequenceEvent,
    SequenceState,
    forks_of,
)
from engine.roster import Roster

_E, _S = SequenceEvent, SequenceState


class Flight:
    """At most one step, begun and then applied or failed."""

    def __init__(
        self,
        roster: Roster,
        admission: Admission,
        kv: KvManager,
        eos_token_ids: Collection[int],
        max_sequence_tokens: int,
    ) -> None:
        self._roster = roster
        self._admission = admission
        self._kv = kv
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_sequence_tokens = max_sequence_tokens
        self._sequences: dict[str, Sequence] = {}
        self._searches: dict[Sequence, Beams] = {}
        self._step = 0
        self._beam_steps = BeamSteps(roster, kv, self.finish_reason, self._end_one)

    @property
    def is_on(self) -> bool:
        return bool(self._sequences)

    @property
    def ended_ids(self) -> set[str]:
        """Who has ended, and holds blocks until the step is over."""
        return {i for i, s in self._sequences.items() if s.state is _S.FINISHED}

    def begin(self, step: int, sequences: Iterable[Sequence]) -> None:
        self._step = step
        self._sequences = {s.request_id: s for s in sequences}
        self._searches = {
            s: beams for s in self._sequences.values() if (beams := self._roster.beams_of(s))
        }

    def apply(self, plan: StepPlan, result: StepResult) -> list[EngineEvent]:
        """The step has ended. Tells what it computed and sampled."""
        if not self._sequences or plan.step != self._step:
            raise IllegalTransition(f"step {plan.step} is not in flight")
        in_flight, self._sequences = self._sequences, {}
        self._kv.copied()
        events: list[EngineEvent] = []
        searches: dict[Beams, list[ScheduledSequence]] = {}
        for row in plan.sequences:
            sequence = in_flight[row.request_id]
            if row.samples and (beams := self._searches.get(sequence)):
                searches.setdefault(beams, []).append(row)
            elif sequence.state is _S.FINISHED:
                self._kv.free(row.request_id)
            elif reason := result.failures.get(row.request_id):
                events += self._failed(sequence, reason)
            elif reason := result.cut_short.get(row.request_id):
                events += self._cut_short(sequence, reason)
            elif not row.samples:
                events += self._computed(sequence, row, result)
            elif row.request_id in result.token_ids:
                events += self._computed(sequence, row, result)
                events += self._sampled(sequence, result)
        for beams, rows in searches.items():
            events += self._searched(beams, rows, in_flight, result)
        return events

    def fail(self, request_ids: Iterable[str], reason: str) -> list[EngineEvent]:
        """The step has crashed and writes nothing any more; these sequences end."""
        in_flight, self._sequences = self._sequences, {}
        for sequence in in_flight.values():
            if sequence.state is _S.FINISHED:
                self._kv.free(sequence.request_id)
        alive = [s for request_id in request_ids if (s := self._roster.get(request_id))]
        return [
            event
            for sequence in alive
            if sequence.state is not _S.FINISHED  # as a beam of one that has just failed
            for event in self._failed(sequence, reason)
        ]

    def join(self, sequence: Sequence, first_token_ids: Tokens[int]) -> None:
        """A TARGET's prompt has landed: publish it, fork it, decode on from the first tokens.

        Args:
            first_token_ids: of the sequence and of each of its forks. An answer that its first
                token ends, ends without being told.
        """
        if len(first_token_ids) != sequence.num_slots:
            count = f"{len(first_token_ids)} first tokens for {sequence.num_slots} answers"
            raise IllegalTransition(f"sequence {sequence.request_id}: {count}")
        self._set_computed(sequence, sequence.num_tokens)
        everybody = [sequence, *self._fork(sequence)]
        for each, token_id in zip(everybody, first_token_ids, strict=True):
            each.advance(_E.JOIN)
            if self.finish_reason(each.request, token_id, len(each.output_token_ids) + 1) is None:
                each.output_token_ids.append(token_id)
            else:
                self.end(each)

    def join_beams(self, sequence: Sequence, candidates: Candidates) -> list[EngineEvent]:
        """A TARGET's prompt has landed: publish it, search on from its most probable tokens."""
        beams = self._roster.beams_of(sequence)
        if beams is None:
            raise IllegalTransition(f"sequence {sequence.request_id}: joins a search, but has none")
        self._set_computed(sequence, sequence.num_tokens)
        sequence.advance(_E.JOIN)
        return self._beam_steps.advance(beams, {sequence.request_id: candidates})

    def finish_reason(
        self, request: Request, token_id: int, num_output_tokens: int
    ) -> FinishReason | None:
        """How the answer ends with ``token_id``, its ``num_output_tokens``-th token, if it does."""
        sampling = request.sampling
        is_eos = token_id in self._eos_token_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        num_tokens = len(request.prompt_token_ids) + num_output_tokens
        if num_output_tokens >= sampling.max_tokens or num_tokens >= self._max_sequence_tokens:
            return FinishReason.LENGTH
        return None

    def end(self, sequence: Sequence) -> None:
        """Out of every list; its blocks are free, or will be once the running forward is over.

        A search ends as a whole.
        """
        beams = self._roster.beams_of(sequence)
        for each in self._beam_steps.members(beams) if beams is not None else (sequence,):
            self._end_one(each)

    def _end_one(self, sequence: Sequence) -> None:
        had_blocks = self.leave(sequence)
        if had_blocks and self._sequences.get(sequence.request_id) is not sequence:
            self._kv.free(sequence.request_id)

    def leave(self, sequence: Sequence) -> bool:
        """Out of every list, and its blocks are the caller's. True when it had some."""
        sequence.advance(_E.FINISH)
        self._admission.left(sequence)
        return self._roster.forget(sequence)

    def _failed(self, sequence: Sequence, reason: str) -> list[EngineEvent]:
        beams = self._roster.beams_of(sequence)
        first_id = beams.request.request_id if beams is not None else sequence.request_id
        ids = [first_id, *(fork.request_id for fork in self._unborn(sequence))]
        self.end(sequence)
        return [Failed(request_id, reason) for request_id in ids]

    def _cut_short(self, sequence: Sequence, reason: str) -> list[EngineEvent]:
        """Before there is any answer, of one or of several, it is a failure."""
        if sequence.purpose is Purpose.SOURCE or sequence.num_unborn_forks:
            return self._failed(sequence, reason)
        self.end(sequence)
        return [CutShort(sequence.request_id, reason)]

    def _searched(
        self,
        beams: Beams,
        rows: Tokens[ScheduledSequence],
        in_flight: dict[str, Sequence],
        result: StepResult,
    ) -> list[EngineEvent]:
        """All running beams of a search were in the step."""
        sequences = [in_flight[row.request_id] for row in rows]
        if sequences[0].state is _S.FINISHED:
            for row in rows:
                self._kv.free(row.request_id)
            return []
        if reason := next(filter(None, (result.failures.get(r.request_id) for r in rows)), None):
            return self._failed(sequences[0], reason)
        if any(row.request_id not in result.candidates for row in rows):
            return []  # thrown away: all are planned again
        events: list[EngineEvent] = []
        for row, sequence in zip(rows, sequences, strict=True):
            self._set_computed(sequence, row.end)
            if sequence.state is _S.PREFILLING:
                sequence.advance(_E.JOIN)
                events.append(Computed(sequence.request_id, row.end))
        return events + self._beam_steps.advance(beams, result.candidates)

    def _computed(
        self, sequence: Sequence, row: ScheduledSequence, result: StepResult
    ) -> list[EngineEvent]:
        self._set_computed(sequence, row.end)
        if told := result.prompt_logprobs.get(row.request_id):
            # After a preemption the prompt is computed, and told, from its beginning.
            sequence.prompt_logprobs = (*sequence.prompt_logprobs[: row.start], *told)
        is_source = sequence.purpose is Purpose.SOURCE
        return [Computed(sequence.request_id, row.end)] if is_source else []

    def _sampled(self, sequence: Sequence, result: StepResult) -> list[EngineEvent]:
        """A SOURCE never says how the answer ends: its target alone decides, and forks."""
        if sequence.purpose is Purpose.SOURCE:
            sequence.advance(_E.PROMPT_COMPUTED)
            ids = [r.request_id for r in (sequence.request, *self._unborn(sequence))]
            told, sequence.prompt_logprobs = sequence.prompt_logprobs, ()
            prompts = {sequence.request_id: told}
            return [
                Sampled(
                    i,
                    result.token_ids[i],
                    None,
                    result.logprobs.get(i),
                    prompts.get(i, ()),
                    result.candidates.get(i, ()),
                )
                for i in ids
            ]
        return [self._append(each, result) for each in (sequence, *self._fork(sequence))]

    def _append(self, sequence: Sequence, result: StepResult) -> Sampled:
        token_id = result.token_ids[sequence.request_id]
        num_output_tokens = len(sequence.output_token_ids) + 1
        reason = self.finish_reason(sequence.request, token_id, num_output_tokens)
        if reason is not None:
            self.end(sequence)
        else:
            sequence.output_token_ids.append(token_id)
            if sequence.state is _S.PREFILLING:
                sequence.advance(_E.JOIN)
        logprobs = result.logprobs.get(sequence.request_id)
        told, sequence.prompt_logprobs = sequence.prompt_logprobs, ()
        return Sampled(sequence.request_id, token_id, reason, logprobs, told)

    def _unborn(self, sequence: Sequence) -> tuple[Request, ...]:
        return forks_of(sequence.request)[1:] if sequence.num_unborn_forks else ()

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """Its forks begin, before anything of its answer: all blocks are shared."""
        born = []
        for request in self._unborn(sequence):
            self._kv.fork(sequence.request_id, request.request_id)
            born.append(self._roster.fork(sequence, request))
        sequence.num_unborn_forks = 0
        return born

    def _set_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """KV below ``num_tokens`` exists: publish the blocks that have become full."""
        block_size = self._kv.block_size
        became_full = num_tokens // block_size > sequence.num_computed_tokens // block_size
        sequence.num_computed_tokens = num_tokens
        if became_full:
            self._kv.publish(sequence.request_id, sequence.token_ids, num_tokens)
