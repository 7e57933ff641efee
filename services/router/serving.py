"""The life of a typed request in the router, whichever face it came through.

    1  admit     ``admission`` holds room for it, then ``intake`` parses it
    2  place     ``attempts`` puts it on instances, and on others when those fail
    3  forward   Accepted, then tokens as they come, and the end of each of several answers
    4  end       exactly one terminal event: Finished, or a ServiceError
    5  account   whatever the end, legs are stopped, the record leaves the table, metrics count it

Closing the iterator early is how a face says that its client has gone.
Knows nothing of gRPC messages' framing, HTTP or JSON. Used by ``inference`` and ``openai_api``.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from engine.request import Request
from protos import inference_pb2 as public
from services.router.admission import Admission
from services.router.attempts import Attempts
from services.router.disaggregation import Rules
from services.router.dispatch import draw_handoff_id
from services.router.fleet import Fleet
from services.router.intake import Intake, Prompt, RawRequest
from services.router.rates import Rates
from services.router.request_table import RequestEvent, RequestRecord, RequestTable
from services.router.timeline import Marks, observe, timeline
from services.router.trace import Origin
from services.router.traces import Traces
from services.runtime.errors import (
    ERROR_CODES,
    Aborted,
    DeadlineExceeded,
    ServiceError,
    to_service_error,
)
from services.runtime.journal import fields
from services.runtime.metrics import RouterMetrics

log = logging.getLogger(__name__)

CLIENT_IS_AHEAD_S = 0.1
"""A client's time began to run before its call was here, and is over before ours is: a call that
ends so close to its deadline has met it."""

UNKNOWN = Origin()
Answer = public.Accepted | public.Tokens | public.ChoiceFinished | public.Finished

FINISH_REASON_NAMES = {
    public.FINISH_REASON_STOP: "stop",
    public.FINISH_REASON_LENGTH: "length",
    public.FINISH_REASON_ABORT: "abort",
    public.FINISH_REASON_ERROR: "error",
}


class Serving:
    """Answers typed requests."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        intake: Intake,
        metrics: RouterMetrics,
        max_context: int,
        rules: Rules,
        traces: Traces,
        clock: Callable[[], float] = time.monotonic,
        new_handoff_id: Callable[[], bytes] = draw_handoff_id,
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._intake = intake
        self._metrics = metrics
        self._max_context = max_context
        self._rules = rules
        self._traces = traces
        self._clock = clock
        self._table = RequestTable()
        self._attempts = Attempts(fleet, metrics, rules, clock, new_handoff_id)
        for name, objective_s in (("ttft", rules.ttft_slo_s), ("tpot", rules.tpot_slo_s)):
            metrics.objective_seconds(name).set(objective_s)

    @property
    def rates(self) -> Rates:
        """How fast the instances are, as far as is known."""
        return self._attempts.rates

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer that the cluster can hold."""
        limit = self._fleet.snapshot().max_tokens
        return self._max_context if limit is None else min(limit, self._max_context)

    @property
    def can_admit(self) -> bool:
        """Whether a request could be placed now."""
        return self._admission.is_open and self._fleet.snapshot().can_admit

    @property
    def model_digest(self) -> str:
        """Of the model that is served; empty while nobody serves it."""
        return self._fleet.snapshot().model_digest

    def abort(self, request_id: str) -> bool:
        """End a request by its id; False: there is no such request."""
        return self._table.abort(request_id)

    def end_all(self, error: ServiceError) -> None:
        """End all requests with ``error``."""
        self._table.end_all(error)

    def refused(self, unexpected: Exception) -> ServiceError:
        """Count a request that ended before it was typed; its error as one of ours."""
        error = to_service_error(unexpected)
        self._metrics.requests_total(error.codes.label).inc()
        return error

    @contextlib.contextmanager
    def enter(self, count: int = 1) -> Iterator[None]:
        """Hold room for ``count`` requests; see ``Admission.enter``."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._admission.enter(count))
            except ServiceError as error:
                raise self.refused(error) from None
            yield

    async def parse(self, raw: RawRequest) -> Request:
        """The typed request; see ``Intake.parse``."""
        try:
            return await self._intake.parse(raw, self.max_context)
        except Exception as unexpected:
            raise self.refused(unexpected) from unexpected

    def refresh_gauges(self) -> None:
        """Bring the gauges up to date; called when they are about to be read."""
        running, waiting = self._table.count()
        self._metrics.requests_running.set(running)
        self._metrics.requests_waiting.set(waiting)

    async def token_ids(self, prompt: Prompt, name: str) -> Sequence[int]:
        """A prompt's tokens; see ``Intake.token_ids``."""
        return await self._intake.token_ids(prompt, name)

    async def answer(
        self,
        request: Request,
        received_s: float,
        deadline_s: float | None = None,
        origin: Origin = UNKNOWN,
    ) -> AsyncGenerator[Answer, None]:
        """Accepted, any number of Tokens, with several answers a ChoiceFinished each, Finished.

        Args:
            received_s: when it reached the router, by the clock.
            deadline_s: when the client stops waiting, a time of the running loop.
            origin: for its trace.

        Raises:
            ServiceError: instead of Finished.
        """
        record = RequestRecord(request.request_id, len(request.prompt_token_ids))
        marks = Marks(received_s, is_traced=self._traces.are_wanted)
        self._table.add(record)
        outcome = "abort"  # of an iterator that is closed early
        try:
            left_s = None
            if deadline_s is not None:
                left_s = deadline_s - asyncio.get_running_loop().time()
            attempt = self._attempts.first(request, record, marks, left_s)
            attempt.start(deadline_s)
            with contextlib.closing(attempt):
                yield public.Accepted(
                    prompt_tokens=len(request.prompt_token_ids), seed=request.sampling.seed
                )
                whole = self._attempts.write(request, record, marks, attempt, deadline_s)
                async with contextlib.aclosing(whole) as answer:
                    async for output in answer:
                        if isinstance(output, public.Tokens):
                            self._note(marks, output)
                        yield output
            finished = self._finished(record, marks)
            record.advance(RequestEvent.FINISH)
            outcome = FINISH_REASON_NAMES.get(finished.finish_reason, "error")
            yield finished
        except Aborted:
            record.advance(RequestEvent.ABORT)
            yield self._aborted(record, marks)
        except Exception as unexpected:
            error = to_service_error(unexpected)
            outcome = error.codes.label
            record.advance(RequestEvent.FAIL)
            raise error from unexpected
        except BaseException:
            # The client has gone, or gRPC ended the call because its time was over.
            due_s = math.inf if deadline_s is None else deadline_s - CLIENT_IS_AHEAD_S
            if asyncio.get_running_loop().time() >= due_s:
                outcome = ERROR_CODES[DeadlineExceeded].label
            raise
        finally:
            self._account(record, marks, outcome, origin)

    def _note(self, marks: Marks, tokens: public.Tokens) -> None:
        count = len(tokens.token_ids)
        now_s = self._clock()
        is_first = marks.first_token_s is None
        gap_s = marks.note_tokens(now_s, count, tokens.index)
        if is_first:
            self._metrics.time_to_first_token_seconds.observe(now_s - marks.received_s)
        elif count and gap_s is not None:
            self._metrics.inter_token_latency_seconds.observe(gap_s)

    def _finished(self, record: RequestRecord, marks: Marks) -> public.Finished:
        end = marks.decode_finished
        assert end is not None
        self._metrics.request_prompt_tokens.observe(record.num_prompt_tokens)
        self._metrics.request_output_tokens.observe(end.output_tokens)
        rules = self._rules
        return public.Finished(
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            usage=public.Usage(
                prompt_tokens=record.num_prompt_tokens,
                output_tokens=end.output_tokens,
                cached_tokens=end.cached_tokens,
            ),
            timeline=observe(marks, self._metrics, rules.ttft_slo_s, rules.tpot_slo_s),
        )

    def _aborted(self, record: RequestRecord, marks: Marks) -> public.Finished:
        marks.finished_s = self._clock()
        return public.Finished(
            finish_reason=public.FINISH_REASON_ABORT,
            usage=public.Usage(
                prompt_tokens=record.num_prompt_tokens, output_tokens=marks.num_output_tokens
            ),
            timeline=timeline(marks),
        )

    def _account(self, record: RequestRecord, marks: Marks, outcome: str, origin: Origin) -> None:
        if not record.is_terminal:
            record.advance(RequestEvent.ABORT)
        self._table.remove(record)
        self._metrics.requests_total(outcome).inc()
        e2e_s = self._clock() - marks.received_s
        said = fields(
            request=record.request_id,
            outcome=outcome,
            prompt_tokens=record.num_prompt_tokens,
            output_tokens=marks.num_output_tokens,
            prefill=marks.prefill_instance,
            decode=marks.decode_instance,
            e2e_s=f"{e2e_s:.3f}",
        )
        log.info("request %s", said)
        self._traces.end(record.request_id, record.num_prompt_tokens, marks, origin, outcome, e2e_s)
