"""Who gets blocks and who gives way: the line, growth, preemption.

Knows states and blocks, not steps or tokens' values. Owned by ``scheduler``.

The line is first come, first served in rank order, for everybody who needs blocks: when one
does not fit, nobody behind it takes blocks before it, so the large ones do not starve.
"""

from collections import deque

from engine.beams import Beams
from engine.config import EngineConfig
from engine.kv.manager import KvManager
from engine.plan import Picked
from engine.request import Purpose, Sequence, SequenceEvent, SequenceState
from engine.roster import Roster

MAX_OPEN_OFFERS = 16
"""SOURCEs that may have blocks and no grant. Bounds what idles on both sides of a handoff."""

_E, _S = SequenceEvent, SequenceState


def awaits_reservation(sequence: Sequence) -> bool:
    """A TARGET in line whose KV will come from elsewhere; after a preemption it is recomputed."""
    return (
        sequence.purpose is Purpose.TARGET
        and sequence.state is _S.WAITING
        and sequence.num_preemptions == 0
    )


class Admission:
    """Moves sequences between the line and the blocks."""

    def __init__(self, roster: Roster, kv: KvManager, config: EngineConfig) -> None:
        self._roster = roster
        self._kv = kv
        self._max_decode_sequences = config.max_decode_sequences
        self._max_prefill_batch = config.max_prefill_batch
        self._blocked: Sequence | None = None  # in line, does not fit: nobody overtakes it
        self.num_preemptions = 0

    # ---- getting blocks --------------------------------------------------------------------

    def pick(self, room_tokens: int) -> list[Picked]:
        """Blocks for the first in line, as far as this step and the offers ahead need them.

        A LOCAL gets them when this step still has room for it; a SOURCE one step ahead, so that
        its grant is back when its turn comes. SOURCEs without a grant are in nobody's way.
        """
        picked: list[Picked] = []
        slots = self._num_free_slots()
        offers = MAX_OPEN_OFFERS - self._roster.num_ungranted()
        prefills = deque(self._roster.prefills())
        tokens_ahead = prompts_ahead = 0
        for sequence in self._roster.waiting:
            while prefills and self._roster.goes_before(prefills[0], sequence):
                tokens_ahead += _num_tokens_left(prefills.popleft())
                prompts_ahead += 1
            steps = 2 if sequence.purpose is Purpose.SOURCE else 1
            soon = (
                tokens_ahead < steps * room_tokens
                and prompts_ahead < steps * self._max_prefill_batch
            )
            if sequence.purpose is Purpose.SOURCE:
                wanted = offers > 0 and soon
            else:
                free = slots >= sequence.num_slots
                wanted = free and (awaits_reservation(sequence) or soon)
            if not wanted:
                continue
            if not self._admit(sequence):
                break
            slots -= sequence.num_slots
            offers -= not sequence.granted
            if sequence.state is _S.PREFILLING:
                if sequence.granted:
                    tokens_ahead += _num_tokens_left(sequence)
                    prompts_ahead += 1
                if sequence.num_preemptions == 0:
                    picked.append(self._picked(sequence))
        return picked

    def try_reserve(self, sequence: Sequence) -> bool:
        """Blocks for a TARGET in line, out of turn of a step but not out of turn in line."""
        blocked = self._blocked
        if blocked is not None and self._roster.goes_before(blocked, sequence):
            return False
        return self._num_free_slots() >= sequence.num_slots and self._admit(sequence)

    def left(self, sequence: Sequence) -> None:
        """It has ended: it blocks nobody any more."""
        if self._blocked is sequence:
            self._blocked = None

    def _admit(self, sequence: Sequence) -> bool:
        """Blocks for all its tokens and a state with blocks; else nobody overtakes it."""
        request_id = sequence.request_id
        # An ended sequence of the same id may hold blocks until its step is applied.
        if request_id in self._kv.sequence_ids:
            return False
        allocation = self._kv.allocate(
            request_id,
            sequence.token_ids,
            sequence.request.salt,
            num_forks=max(1, sequence.num_slots),
            takes_over=not self._computes_whole_prompt(sequence),
        )
        if allocation is None:
            self._block_on(sequence)
            return False
        self.left(sequence)
        sequence.advance(_E.RESERVE if awaits_reservation(sequence) else _E.PICK)
        sequence.num_computed_tokens = allocation.num_cached_tokens
        sequence.num_cached_tokens = allocation.num_cached_tokens
        self._roster.start(sequence)
        return True

    @staticmethod
    def _computes_whole_prompt(sequence: Sequence) -> bool:
        """Logprobs of a prompt need its every row, which a cached block would spare."""
        tells = sequence.request.tells_prompt and not sequence.output_token_ids
        return tells and not awaits_reservation(sequence)

    def _block_on(self, sequence: Sequence) -> None:
        if self._blocked is None or self._roster.goes_before(sequence, self._blocked):
            self._blocked = sequence

    def _num_free_slots(self) -> int:
        return self._max_decode_sequences - self._roster.num_slots_taken()

    def _picked(self, sequence: Sequence) -> Picked:
        table = self._kv.block_table(sequence.request_id)
        return Picked(sequence.request_id, sequence.num_cached_tokens, table)

    # ---- giving way ------------------------------------------------------------------------

    def grow_decodes(self) -> bool:
        """Room for the next token of every decode; True when somebody was preempted for it.

        In rank order, and the last in rank gives way: so the first always gets on.
        """
        before = self.num_preemptions
        for sequence in self._roster.decodes():
            while sequence.state is _S.DECODING and not self._kv.append(
                sequence.request_id, sequence.num_tokens
            ):
                self._preempt(self._youngest())
        return self.num_preemptions > before

    def _youngest(self) -> Sequence:
        """Last in rank of those whose KV no handoff reads or writes."""
        return next(
            sequence
            for sequence in reversed(self._roster.running)
            if sequence.purpose is not Purpose.SOURCE and sequence.state is not _S.PENDING_DECODE
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Take its blocks. It keeps its output and its place in line; its KV is recomputed.

        A search loses all its beams but the first, and begins anew.
        """
        if (beams := self._roster.beams_of(sequence)) is not None:
            sequence = self._give_up_beams(beams)
        self._kv.free(sequence.request_id)
        sequence.advance(_E.PREEMPT)
        sequence.num_computed_tokens = sequence.num_cached_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        sequence.advance(_E.REQUEUE)
        self._roster.requeue(sequence)
        self._block_on(sequence)

    def _give_up_beams(self, beams: Beams) -> Sequence:
        """The first beam, which has written nothing now; the others are gone."""
        for request_id in beams.request_ids:
            beam = self._roster.get(request_id)
            assert beam is not None
            if request_id == beams.request.request_id:
                first = beam
                continue
            self._kv.free(request_id)
            beam.advance(_E.FINISH)
            self.left(beam)
            self._roster.forget(beam)
        first.output_token_ids.clear()
        first.num_unborn_forks = first.request.sampling.num_candidates - 1
        beams.restart()
        return first


def _num_tokens_left(sequence: Sequence) -> int:
    return sequence.num_tokens - sequence.num_computed_tokens
