"""The attempts at one request, one after the other, until its answer is whole.

    1  place     instances are chosen from a snapshot
    2  attempt   ``dispatch`` follows both legs; its tokens are passed on
    3  failed    ``healing`` says whether another attempt goes on after the tokens that are out
    4  again     on instances that are left, or come back within a second; the request reads as its
                 prompt and what was written of the answer; several are written anew (``replay``)

Nobody outside sees a seam: tokens, text, stops, counts and randomness follow from parameters,
prompt and output alone. Knows nothing of clients. Used by ``serving``.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine.kv.prefix import block_hashes, root_hash
from engine.request import Request
from protos import inference_pb2 as public
from services.router.admission import check_in_time
from services.router.breaker import Breakers
from services.router.disaggregation import Rules
from services.router.dispatch import Attempt, draw_handoff_id
from services.router.fleet import Fleet
from services.router.healing import CAPACITY_S, PROOF_S, History, LegFailure, is_curable, verdict
from services.router.learning import learn
from services.router.membership import InstanceState, Snapshot
from services.router.placement import BY_PREFIX, Placement, place
from services.router.prediction import Demand, Prediction, predict_here, predict_pair
from services.router.rates import Rates
from services.router.replay import Output, Replay
from services.router.request_table import RequestEvent, RequestRecord
from services.router.timeline import Marks
from services.runtime.errors import DeadlineExceeded, ServiceError, Unavailable
from services.runtime.journal import fields
from services.runtime.metrics import RouterMetrics

log = logging.getLogger(__name__)


class Attempts:
    """Places requests, and places them again."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: RouterMetrics,
        rules: Rules,
        clock: Callable[[], float] = time.monotonic,
        new_handoff_id: Callable[[], bytes] = draw_handoff_id,
    ) -> None:
        self._new_handoff_id = new_handoff_id
        self._fleet = fleet
        self._metrics = metrics
        self._rules = rules
        self._rates = Rates()
        self._clock = clock
        self._turn = 0
        self._breakers = Breakers()

    @property
    def rates(self) -> Rates:
        """How fast the instances are, as far as is known."""
        return self._rates

    def first(
        self, request: Request, record: RequestRecord, marks: Marks, left_s: float | None = None
    ) -> Attempt:
        """The first attempt, not yet started.

        Args:
            left_s: until the client's deadline.

        Raises:
            Unavailable: nobody can take it now.
            InvalidArgument: nobody here could ever take it.
            ResourceExhausted: it would have to wait too long.
        """
        placed = self._place(request, History())
        if placed.predicted is not None:
            check_in_time(placed.predicted, self._rules.max_wait_s, left_s)
        return self._attempt(request, record, marks, placed)

    async def write(
        self,
        request: Request,
        record: RequestRecord,
        marks: Marks,
        attempt: Attempt,
        deadline_s: float | None,
    ) -> AsyncGenerator[Output, None]:
        """The whole answer, through as many attempts as it takes."""
        history = History()
        has_one_answer = request.sampling.num_candidates == 1
        replay = Replay()
        while True:
            output: list[int] = []
            try:
                async with contextlib.aclosing(attempt.run()) as outputs_of_attempt:
                    async for each in outputs_of_attempt:
                        if has_one_answer or replay.is_new(each):
                            output += each.token_ids if isinstance(each, public.Tokens) else ()
                            yield each
                self._note_success(request, marks, attempt)
                return
            except LegFailure as failure:
                now_s = self._clock()
                self._note_failure(failure, now_s)
                history = history.after(failure, len(output), now_s)
                told = verdict(history, failure, now_s)
                log.warning("request %s", _failed_attempt(record, marks, failure, told))
                if told is not None:
                    raise told from failure.error
                failed = failure
            self._metrics.retries_total.inc()
            record.advance(RequestEvent.RETRY)
            if has_one_answer:
                request = replace(request, output_token_ids=(*request.output_token_ids, *output))
            replay.restart()
            with self._ended_from_outside(record, deadline_s) as ended:
                until_s = asyncio.get_running_loop().time() + CAPACITY_S
                try:
                    silent: frozenset[str] = frozenset()
                    if failed.died:
                        silent = await self._silent_since(now_s, ended)
                    avoid = replace(history, avoid=history.avoid | silent)
                    attempt = await self._place_again(request, record, marks, avoid, ended, until_s)
                except Unavailable as nobody:
                    raise Unavailable(f"{failed.error}; {nobody}") from failed.error
            attempt.start(deadline_s)

    def _note_success(self, request: Request, marks: Marks, attempt: Attempt) -> None:
        """Also what it teaches of how fast they are."""
        self._breakers.succeeded(filter(None, (marks.prefill_instance, marks.decode_instance)))
        num_beside = (attempt.num_beside_at_start + attempt.num_beside) // 2
        learn(self._rates, marks, request.num_known_tokens, num_beside, attempt.prefill_s)

    def _note_failure(self, failure: LegFailure, now_s: float) -> None:
        """A death is seen by everybody, and neither what is wrong with a request nor an instance
        that drains is anybody's fault."""
        if is_curable(failure.error) and not failure.died:
            views = self._fleet.snapshot().instances
            here = [view.instance.instance_id for view in views]
            self._breakers.keep_only(here)
            self._rates.keep_only(here)
            draining = {v.instance.instance_id for v in views if v.state is InstanceState.DRAINING}
            if not draining & failure.living:
                self._breakers.failed(failure.living, now_s)

    @contextlib.contextmanager
    def _ended_from_outside(
        self, record: RequestRecord, deadline_s: float | None
    ) -> Iterator[asyncio.Future[ServiceError]]:
        """What ends the request while it has no attempt that could be told."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[ServiceError] = loop.create_future()

        def end(error: ServiceError) -> None:
            if not ended.done():
                ended.set_result(error)

        record.end = end
        passed = DeadlineExceeded("the request's deadline has passed")
        timer = loop.call_at(deadline_s, end, passed) if deadline_s is not None else None
        try:
            yield ended
        finally:
            if timer is not None:
                timer.cancel()

    async def _silent_since(
        self, died_s: float, ended: asyncio.Future[ServiceError]
    ) -> frozenset[str]:
        """Who has given no sign of life since another died. Waits a little until all have.

        Raises:
            ServiceError: what ended the request meanwhile.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + PROOF_S
        while True:
            changed = asyncio.ensure_future(self._fleet.changed())
            try:
                silent = self._fleet.snapshot().unheard(died_s)
                if not silent or loop.time() >= until_s:
                    return silent
                await _first_of(changed, ended, until_s - loop.time())
            finally:
                changed.cancel()

    async def _place_again(
        self,
        request: Request,
        record: RequestRecord,
        marks: Marks,
        history: History,
        ended: asyncio.Future[ServiceError],
        until_s: float,
    ) -> Attempt:
        """Another attempt, on what is there or comes back by ``until_s``.

        Raises:
            Unavailable: nobody is there, and nobody came.
            ServiceError: what ended the request meanwhile.
        """
        loop = asyncio.get_running_loop()
        while True:
            changed = asyncio.ensure_future(self._fleet.changed())
            try:
                placed = self._place(request, history)
                return self._attempt(request, record, marks, placed)
            except Unavailable:
                await _first_of(changed, ended, max(0.0, until_s - loop.time()))
                if loop.time() >= until_s:
                    raise
            finally:
                changed.cancel()

    def _place(self, request: Request, history: History) -> "_Placed":
        self._turn += 1
        snapshot = self._fleet.snapshot()
        demand = self._demand(request, snapshot)
        avoid = history.avoid | self._breakers.open(self._clock())
        placement = place(demand, snapshot, self._rules, self._rates, self._turn, avoid)
        views = {view.instance.instance_id: view for view in snapshot.instances}
        decode, prefill = views[placement.decode], views.get(placement.prefill or "")
        predicted = None
        if self._rates.are_known:
            predicted = (
                predict_here(demand, decode, self._rates)
                if prefill is None
                else predict_pair(demand, prefill, decode, self._rates)
            )
        self._metrics.placements_total("together" if prefill is None else "apart").inc()
        reader = prefill or decode
        return _Placed(placement, demand.uncached(reader), predicted)

    def _demand(self, request: Request, snapshot: Snapshot) -> Demand:
        num_known = request.num_known_tokens
        max_tokens = request.sampling.max_tokens - len(request.output_token_ids)
        if self._rules.policy not in BY_PREFIX or not snapshot.instances:
            return Demand(num_known, max_tokens)
        block_size = snapshot.instances[0].instance.kv_layout.block_size
        root = root_hash(snapshot.model_digest, salt=request.salt)
        hashes = block_hashes(root, request.known_token_ids, block_size)
        cached = self._fleet.cache.num_cached_blocks(hashes)
        return Demand(num_known, max_tokens, {i: n * block_size for i, n in cached.items()})

    def _attempt(
        self, request: Request, record: RequestRecord, marks: Marks, placed: "_Placed"
    ) -> Attempt:
        where = placed.placement
        marks.begin_attempt()
        return Attempt(
            request,
            record,
            marks,
            self._fleet.link(where.decode),
            self._fleet.link(where.prefill) if where.prefill else None,
            marks.num_attempts,
            self._clock,
            self._new_handoff_id,
            placed.num_uncached_tokens,
        )


async def _first_of(
    changed: "asyncio.Future[Any]", ended: "asyncio.Future[ServiceError]", timeout_s: float
) -> None:
    """Wait for either.

    Raises:
        ServiceError: what ended the request.
    """
    either: set[asyncio.Future[Any]] = {changed, ended}
    await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        raise ended.result() from None


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where an attempt will run, and what is expected of it."""

    placement: Placement
    num_uncached_tokens: int
    """What whoever reads the prompt has to compute."""
    predicted: Prediction | None
    """None: nothing is known yet."""


def _failed_attempt(
    record: RequestRecord, marks: Marks, failure: LegFailure, told: ServiceError | None
) -> str:
    return fields(
        request=record.request_id,
        attempt=marks.num_attempts,
        outcome="retry" if told is None else "failed",
        output_tokens=marks.num_output_tokens,
        prefill=marks.prefill_instance,
        decode=marks.decode_instance,
        reason=str(failure.error),
    )
