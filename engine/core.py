"""An engine without a thread: one scheduler, one runner, and everything that may be asked of them.

    1  plan     under the lock: the scheduler picks this step's tokens
    2  run      without the lock: the forward; every layer written is told at once
    3  apply    under the lock: tokens are appended, blocks published and freed
    4  tell     without the lock: events go to the listener, one list a step

Everything else (submit, reserve, finish, ...) may be called from any thread and takes the lock
for microseconds, so a GRANT never waits for a forward. Blocks that a running forward uses are
freed by the scheduler only when that step is applied.

Knows nothing of handoffs, sockets or text, nor who drives its steps: ``engine.loop`` does, on a
thread. Asked by the prefill and the decode service.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.beams import Candidates
from engine.kv.journal import CacheNews
from engine.kv.pool import BlockStats
from engine.pace import Pace
from engine.plan import EngineEvent, StepPlan, StepResult
from engine.request import FinishReason, Purpose, Request
from engine.scheduler import Reservation, Scheduler

log = logging.getLogger(__name__)

LayerWritten = Callable[[StepPlan, int], None]


class StepRunner(Protocol):
    """Runs one plan. ``on_layer(i)``: KV of layer i of all scheduled tokens is in the cache."""

    def run(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as plain data, for metrics."""

    num_decode_tokens: int
    num_prefill_tokens: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of one engine; the last three count from its start."""

    blocks: BlockStats
    fragmentation_ratio: float
    """Share of the held slots that no token is for."""
    requests_running: int
    requests_waiting: int
    prompt_tokens_waiting: int
    """Of sequences that are here: tokens to compute before their next one."""
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int


class EngineListener(Protocol):
    """Hears of everything on the step thread; must be quick and must not raise."""

    def wants_layers(self, plan: StepPlan) -> bool:
        """Whether anybody waits for single layers of this step; telling them costs time."""
        ...

    def layer_written(self, plan: StepPlan, layer: int) -> None:
        """In order, each layer once; from the step thread or one that the runner has."""
        ...

    def stepped(self, events: list[EngineEvent], record: StepRecord | None) -> None: ...


class EngineCore:
    """One scheduler and one runner; whoever drives it calls ``next_plan`` and ``step`` in turn."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        pace: Pace,
        listener: EngineListener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._pace = pace
        self._listener = listener
        self._clock = clock
        self._lock = threading.RLock()
        self._running_step: int | None = None

    @property
    def step_in_flight(self) -> int | None:
        """The number of the step that is running now."""
        return self._running_step

    # ---- from any thread ------------------------------------------------------------------

    def submit(self, request: Request, purpose: Purpose) -> None:
        """Queue a LOCAL or SOURCE sequence.

        Raises:
            CapacityError: it can never fit.
        """
        with self._lock:
            self._scheduler.add(request, purpose, self._clock())
            self.work_came()

    def grant(self, request_id: str) -> None:
        """The target has blocks: this SOURCE may be computed. Unknown ids are ignored."""
        with self._lock:
            self._scheduler.grant(request_id)
            self.work_came()

    def reserve(self, request: Request) -> Reservation | None:
        """Blocks for a prompt whose KV will arrive; None: not now, it stands in line.

        Call again with the same request when something moved, or ``finish`` it.

        Raises:
            CapacityError: it can never fit.
        """
        with self._lock:
            return self._scheduler.reserve(request, self._clock())

    def join(self, request_id: str, *first_token_ids: int) -> None:
        """The reserved prompt's KV has landed and this is its first output token: decode on.

        With several answers: the first token of each.
        """
        with self._lock:
            self._scheduler.join(request_id, *first_token_ids)
            self.work_came()

    def join_beams(self, request_id: str, candidates: Candidates) -> None:
        """As ``join``, for a beam search: its prompt's most probable first tokens."""
        with self._lock:
            events = self._scheduler.join_beams(request_id, candidates)
            self.work_came()
        if events:
            self._listener.stepped(events, None)

    def finish(self, request_id: str) -> None:
        """This engine is done with a sequence; its blocks are freed. Unknown ids are ignored."""
        with self._lock:
            self._scheduler.finish(request_id)
            self.work_came()

    def finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        """How the answer ends if ``token_id`` is its first new one; None: it goes on."""
        num_output_tokens = len(request.output_token_ids) + 1
        return self._scheduler.finish_reason(request, token_id, num_output_tokens)

    def block_hashes(self, request: Request) -> tuple[bytes, ...]:
        """Hashes of the full blocks of what is known: equal on every instance of a cluster."""
        return tuple(self._scheduler.kv.hashes(request.known_token_ids, request.salt))

    def cache_news(self, sequence: int) -> CacheNews:
        """What entered and left the prefix cache from ``sequence`` on; 0: all that is in it."""
        with self._lock:
            return self._scheduler.kv.news(sequence)

    def load(self) -> EngineLoad:
        with self._lock:
            kv = self._scheduler.kv
            return EngineLoad(
                kv.stats(),
                kv.fragmentation_ratio(),
                self._scheduler.num_running,
                self._scheduler.num_waiting,
                self._scheduler.num_tokens_waiting,
                self._scheduler.stats().num_preemptions,
                kv.num_query_tokens,
                kv.num_hit_tokens,
            )

    def check_integrity(self) -> None:
        """Raises AssertionError when a block is lost, owned twice or miscounted."""
        with self._lock:
            self._scheduler.check_integrity()

    # ---- by whoever drives the steps, one at a time -----------------------------------------

    def work_came(self) -> None:
        """Something was submitted, granted, joined or finished: there may be a plan now.

        Called with the lock held, from any thread. Drivers wait for it.
        """

    def next_plan(self) -> StepPlan | None:
        """This step's work; None: there is none until ``work_came``.

        Sequences that were picked are told at once.
        """
        while True:
            with self._lock:
                limit = self._pace.limit_tokens(self._scheduler.chunks_ride_beside_decodes)
                plan, picked = self._scheduler.plan(limit)
            if picked:
                self._listener.stepped(list(picked), None)
            if plan.sequences:
                return plan
            if not picked:
                return None

    def step(self, plan: StepPlan) -> None:
        """Run a plan and apply what came of it."""

        def on_layer(layer: int) -> None:
            self._listener.layer_written(plan, layer)

        started_s = self.begin(plan)
        try:
            wanted = self._listener.wants_layers(plan)
            result = self._runner.run(plan, on_layer if wanted else None)
        except Exception as error:
            self.give_up(plan, error)
        else:
            self.end(plan, result, started_s)

    def begin(self, plan: StepPlan) -> float:
        """The forward begins; returns the time."""
        self._running_step = plan.step
        return self._clock()

    def end(self, plan: StepPlan, result: StepResult, started_s: float) -> None:
        """The forward has ended: apply its result, tell its events."""
        self._running_step = None
        elapsed_s = self._clock() - started_s
        num_decode, num_prefill = plan.num_decode_tokens, plan.num_prefill_tokens
        record = StepRecord(num_decode, num_prefill, elapsed_s)
        self._pace.observe(num_prefill, num_decode, record.elapsed_s)
        with self._lock:
            events = self._scheduler.apply(plan, result)
        self._listener.stepped(events, record)

    def give_up(self, plan: StepPlan, error: Exception) -> None:
        """A step failed as a whole: its sequences end with a reason, the engine lives on."""
        self._running_step = None
        log.error("step %d failed: %s", plan.step, error, exc_info=error)
        reason = f"the engine failed in step {plan.step}: {type(error).__name__}"
        with self._lock:
            events = self._scheduler.fail([s.request_id for s in plan.sequences], reason)
        self._listener.stepped(events, None)
