"""Which tokens the next step computes, and what follows from its result.

Decides for the sequences of one engine. Knows counts and blocks, not tensors, text or
handoffs. Called by ``loop``, which holds a lock, passes the time of arrivals in, and has at most
one step in flight:

    add / reserve     a sequence gets in line
    plan              the first in line get blocks (``Picked``); this step's tokens are chosen
    apply             the step's result: tokens appended, blocks published, the ended freed
    grant / join      a handoff moved: a SOURCE may be computed; a TARGET's prompt has landed
    finish            the service is done with a sequence

Who owns the blocks of a sequence, and from when until when:

    LOCAL    pick .. its last token, ``finish``, or preemption
    SOURCE   pick .. ``finish``, because a handoff reads its KV; never preempted
    TARGET   ``reserve`` .. ``finish``; never preempted before ``join``, then as LOCAL

A request with several answers is one sequence until its prompt is computed or has landed. Then
it forks: every answer is a sequence of its own, under an id of its own (``forks_of``), which
shares the prompt's blocks, is preempted alone and has to be finished alone.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.admission import Admission, awaits_reservation
from engine.beams import Candidates
from engine.composer import Composer
from engine.config import EngineConfig
from engine.errors import (
    CapacityError,
    IllegalTransition,
    IntegrityError,
    InvalidConfig,
    InvalidRequest,
)
from engine.flight import Flight
from engine.kv.manager import KvManager
from engine.plan import EngineEvent, Picked, StepPlan, StepResult
from engine.request import FinishReason, Purpose, Request, SequenceState
from engine.roster import Roster

_S = SequenceState


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks for a prompt whose KV will arrive; that of the first tokens is there already."""

    block_table: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """How many sequences are in each state, and preemptions so far."""

    num_waiting: int
    num_prefilling: int
    num_pending_decode: int
    num_decoding: int
    num_preemptions: int


class Scheduler:
    """The scheduler of one engine.

    Args:
        config: its limits and its schedule are read.
        kv: the engine's blocks; nobody else allocates from it.
        max_context: most tokens of prompt and answer together.

    Raises:
        InvalidConfig: the budget leaves prefill no room beside all decodes.
    """

    def __init__(
        self, config: EngineConfig, kv: KvManager, eos_token_ids: Collection[int], max_context: int
    ) -> None:
        if config.token_budget < config.max_decode_sequences + kv.block_size:
            raise InvalidConfig(
                f"token_budget {config.token_budget}: must be at least max_decode_sequences + "
                f"block_size = {config.max_decode_sequences + kv.block_size}"
            )
        self.kv = kv
        self.max_sequence_tokens = min(max_context, kv.capacity_tokens)
        """Most tokens of prompt and answer together: where an answer ends with LENGTH."""
        self._max_decode_sequences = config.max_decode_sequences
        self._roster = Roster()
        self._admission = Admission(self._roster, kv, config)
        self._composer = Composer(self._roster, self._admission, kv, config)
        self._flight = Flight(
            self._roster, self._admission, kv, eos_token_ids, self.max_sequence_tokens
        )
        self._num_steps = 0

    # ---- what the services say -------------------------------------------------------------

    def add(self, request: Request, purpose: Purpose, now_s: float) -> None:
        """Put a LOCAL or SOURCE sequence in line. A SOURCE is computed once it is granted.

        Raises:
            CapacityError: it can never fit.
            InvalidRequest: its id is in use here.
        """
        if purpose is Purpose.TARGET:
            raise IllegalTransition(f"sequence {request.request_id}: a TARGET enters by reserve")
        self._check_fits(request, purpose)
        self._roster.enter(request, purpose, now_s)

    def reserve(self, request: Request, now_s: float) -> Reservation | None:
        """Blocks for a prompt whose KV will arrive (a TARGET). None: not now.

        After None it stands in line with the others, and a plan may set its blocks aside: call
        again, with the same object, when something moved, or else ``finish``.

        Raises:
            CapacityError: it can never fit.
            InvalidRequest: its id is in use here.
        """
        sequence = self._roster.get(request.request_id)
        if sequence is None or sequence.request is not request:
            self._check_fits(request, Purpose.TARGET)
            sequence = self._roster.enter(request, Purpose.TARGET, now_s)
        if awaits_reservation(sequence) and not self._admission.try_reserve(sequence):
            return None
        if sequence.state is not _S.PENDING_DECODE:
            raise IllegalTransition(f"sequence {request.request_id}: is past its reservation")
        return Reservation(self.kv.block_table(request.request_id), sequence.num_cached_tokens)

    def grant(self, request_id: str) -> None:
        """The target has blocks: this SOURCE may be computed. Ended ones are ignored."""
        if sequence := self._roster.get(request_id):
            sequence.granted = True

    def join(self, request_id: str, *first_token_ids: int) -> None:
        """A reserved prompt's KV has landed: publish it, fork it, decode on from first tokens.

        First tokens, one for the sequence and each of its forks, are not told again: who has them
        applies ``finish_reason``, and an answer that ends with its first token ends here, too.
        Ended sequences are ignored.
        """
        if sequence := self._roster.get(request_id):
            if sequence.purpose is not Purpose.TARGET or sequence.state is not _S.PENDING_DECODE:
                raise IllegalTransition(f"sequence {request_id}: joins, but has no reservation")
            self._flight.join(sequence, first_token_ids)

    def join_beams(self, request_id: str, candidates: Candidates) -> list[EngineEvent]:
        """As ``join``, for a beam search: on from the most probable first tokens.

        Tells of the end of a search that they end. Ended sequences are ignored.
        """
        sequence = self._roster.get(request_id)
        if sequence is None:
            return []
        if sequence.purpose is not Purpose.TARGET or sequence.state is not _S.PENDING_DECODE:
            raise IllegalTransition(f"sequence {request_id}: searches, but has no reservation")
        return self._flight.join_beams(sequence, candidates)

    def finish(self, request_id: str) -> None:
        """The service is done with a sequence, whatever its state. Ended ones are ignored."""
        if sequence := self._roster.get(request_id):
            self._flight.end(sequence)

    def quarantine(self, request_id: str) -> tuple[int, ...]:
        """End a TARGET whose remote writer cannot be proven quiet; its blocks are locked away.

        Returns them, for ``kv.release_quarantine``. Ended sequences are ignored.
        """
        sequence = self._roster.get(request_id)
        if sequence is None:
            return ()
        if sequence.state is not _S.PENDING_DECODE or sequence.purpose is not Purpose.TARGET:
            raise IllegalTransition(f"sequence {request_id}: no remote writer writes to it")
        self._flight.leave(sequence)
        return self.kv.quarantine(request_id)

    def finish_reason(
        self, request: Request, token_id: int, num_output_tokens: int
    ) -> FinishReason | None:
        """How the answer ends with ``token_id``, its ``num_output_tokens``-th token, if it does."""
        return self._flight.finish_reason(request, token_id, num_output_tokens)

    # ---- what the services ask -------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return self._roster.num_waiting

    @property
    def num_tokens_waiting(self) -> int:
        """Prompt tokens to compute, of everybody here that does not decode yet."""
        waiting = (*self._roster.waiting, *self._roster.prefills())
        here = (s for s in waiting if s.purpose is not Purpose.TARGET)
        return sum(s.num_tokens - s.num_computed_tokens for s in here)

    @property
    def num_running(self) -> int:
        """Sequences that have blocks."""
        return self._roster.num_running

    @property
    def chunks_ride_beside_decodes(self) -> bool:
        """A chunk of the next step delays the tokens of running answers."""
        return self._composer.chunks_ride_beside_decodes

    def has_work(self) -> bool:
        """False: a plan would be empty. If one is empty all the same, nothing moves by itself."""
        return bool(self.num_waiting or self._roster.decodes() or self._roster.prefills())

    def stats(self) -> SchedulerStats:
        states = [sequence.state for sequence in self._roster.running]
        return SchedulerStats(
            num_waiting=self.num_waiting,
            num_prefilling=states.count(_S.PREFILLING),
            num_pending_decode=states.count(_S.PENDING_DECODE),
            num_decoding=states.count(_S.DECODING),
            num_preemptions=self._admission.num_preemptions,
        )

    def check_integrity(self) -> None:
        """Sequences and blocks add up.

        Raises:
            IntegrityError: they do not.
        """
        self._roster.check_integrity()
        self.kv.check_integrity()
        running = {sequence.request_id for sequence in self._roster.running}
        ended_in_flight = self._flight.ended_ids
        if running | ended_in_flight != set(self.kv.sequence_ids) or running & ended_in_flight:
            raise IntegrityError("blocks are held by others than the running sequences")
        if self._roster.num_slots_taken() > self._max_decode_sequences:
            raise IntegrityError("more sequences than decode slots")

    # ---- plan ------------------------------------------------------------------------------

    def plan(self, prefill_limit_tokens: int) -> tuple[StepPlan, list[Picked]]:
        """The next step, and who got blocks. An empty plan is not in flight.

        Args:
            prefill_limit_tokens: most prefill tokens of the step, from measured speed; less
                than a block counts as a block.
        """
        if self._flight.is_on:
            raise IllegalTransition("planned while a step is in flight")
        composition, picked = self._composer.compose(prefill_limit_tokens)
        if not composition.sequences:
            return StepPlan(self._num_steps), picked
        self._num_steps += 1
        self._flight.begin(self._num_steps, composition.sequences)
        return self._composer.plan_of(self._num_steps, composition), picked

    def apply(self, plan: StepPlan, result: StepResult) -> list[EngineEvent]:
        """The step has ended. Tells what it computed and sampled.

        A row in ``failures`` ends its sequence. A row that should have sampled and has neither
        a token nor a failure was thrown away: it is planned again.
        """
        return self._flight.apply(plan, result) if plan.sequences else []

    def fail(self, request_ids: Iterable[str], reason: str) -> list[EngineEvent]:
        """The step in flight has crashed and writes nothing any more; these sequences end.

        The others of that step are planned again. Tells of those that had not ended before.
        """
        return self._flight.fail(request_ids, reason)

    def _check_fits(self, request: Request, purpose: Purpose) -> None:
        num_tokens = request.num_known_tokens
        if not num_tokens:  # it would never be picked, nor end
            raise InvalidRequest("prompt", "is empty")
        if num_tokens + 1 > self.max_sequence_tokens:
            raise CapacityError(
                f"the prompt has {num_tokens} tokens, and prompt and answer together fit "
                f"{self.max_sequence_tokens}: shorten the prompt"
            )
        num_candidates = request.sampling.num_candidates
        if purpose is Purpose.SOURCE or num_candidates == 1:
            return
        if num_candidates > self._max_decode_sequences:
            raise CapacityError(
                f"{num_candidates} answers at once are more than --max-decode-sequences = "
                f"{self._max_decode_sequences}: ask for fewer"
            )
        num_blocks = -(-num_tokens // self.kv.block_size) + num_candidates - 1
        if request.sampling.beam_search is not None:
            # Nothing of a search can be told before its end, so it must be able to reach it.
            most = min(num_tokens + request.sampling.max_tokens, self.max_sequence_tokens)
            num_shared = num_tokens // self.kv.block_size
            num_own = -(-most // self.kv.block_size) - num_shared
            num_blocks = num_shared + num_candidates * num_own
        if num_blocks * self.kv.block_size > self.kv.capacity_tokens:
            raise CapacityError(
                f"{num_candidates} answers to a prompt of {num_tokens} tokens do not fit the KV "
                "cache: ask for fewer or, in a beam search, shorter ones"
            )
