"""One attempt at answering a request on chosen instances.

    1  start    StartDecode and StartPrefill leave at the same time, with a fresh handoff id, under
                an id that no other attempt has: an instance may still let go of the last one
    2  follow   what both legs say arrives in one inbox, in the order it came
    3  emit     only the decode leg writes; its tokens are passed on
    4  end      decode finished: the answer is whole. The first leg that fails, the client's
                deadline or its abort end the attempt at once; legs still running get StopWork

A prefill leg that fails once decode goes on alone has failed at nothing. An attempt is never
resumed: going on elsewhere is another attempt, on the prompt and the tokens so far, if ``healing``
says so. Knows nothing of clients. Made by ``serving``.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from engine.request import Request
from protos import inference_pb2 as public
from protos import worker_pb2 as wire
from services.router.healing import LegFailure
from services.router.link import Event, Link
from services.router.replay import Output
from services.router.request_table import RequestEvent, RequestRecord, RequestState
from services.router.timeline import Marks
from services.runtime.errors import (
    Aborted,
    DeadlineExceeded,
    ServiceError,
    Unavailable,
    from_code,
)
from services.runtime.work import work_request_message

HANDOFF_ID_BYTES = 16
FINISH_GRACE_S = 0.05
"""How long a finished answer waits for the prefill leg's report, to complete the timeline."""


def draw_handoff_id() -> bytes:
    """Nobody can guess it: it is what keeps handoffs apart."""
    return secrets.token_bytes(HANDOFF_ID_BYTES)


@dataclass(slots=True)
class _Leg:
    link: Link
    is_running: bool = True


class Attempt:
    """Both legs of one try, from their orders to the end."""

    def __init__(
        self,
        request: Request,
        record: RequestRecord,
        marks: Marks,
        decode: Link,
        prefill: Link | None,
        number: int = 1,
        clock: Callable[[], float] = time.monotonic,
        new_handoff_id: Callable[[], bytes] = draw_handoff_id,
        num_uncached_tokens: int | None = None,
    ) -> None:
        self._work_id = f"{request.request_id}/{number}"
        self._request = replace(request, request_id=self._work_id)
        self._record = record
        self._marks = marks
        self._decode = _Leg(decode)
        self._prefill = _Leg(prefill) if prefill is not None else None
        self._clock = clock
        self._new_handoff_id = new_handoff_id
        self._num_uncached_tokens = num_uncached_tokens
        self._inbox: asyncio.Queue[tuple[_Leg | None, Event | ServiceError]] = asyncio.Queue()
        self._deadline: asyncio.TimerHandle | None = None
        self.num_beside_at_start = decode.pending.num_requests
        self.prefill_s: float | None = None
        """How long an instance was at the prompt alone; None: not known."""

    def start(self, deadline_s: float | None = None) -> None:
        """Send the orders. ``deadline_s`` is a time of the running loop."""
        request = work_request_message(self._request)
        order = wire.StartDecode(request=request)
        num_tokens = self._num_uncached_tokens
        if num_tokens is None:
            num_tokens = self._request.num_known_tokens
        if self._prefill is not None:
            handoff_id = self._new_handoff_id()
            target, source = self._decode.link.instance, self._prefill.link.instance
            order.handoff_id = handoff_id
            order.source_instance_id = source.instance_id
            self._prefill.link.start(
                wire.StartPrefill(
                    request=request,
                    handoff_id=handoff_id,
                    target_address=target.address,
                    target_instance_id=target.instance_id,
                    wants_trace=self._marks.is_traced,
                ),
                self._sink(self._prefill),
                num_tokens,
            )
            self._marks.prefill_instance = source.instance_id
            num_tokens = 0
        self._decode.link.start(order, self._sink(self._decode), num_tokens)
        self._marks.decode_instance = self._decode.link.instance.instance_id
        if self._marks.dispatched_s is None:
            self._marks.dispatched_s = self._clock()
        self._record.advance(RequestEvent.DISPATCH)
        self._record.end = self.end
        if deadline_s is not None:
            passed = DeadlineExceeded("the request's deadline has passed")
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_at(deadline_s, self.end, passed)

    @property
    def num_beside(self) -> int:
        """Other requests on the decode instance now."""
        pending = self._decode.link.pending.num_requests
        return pending - 1 if self._decode.is_running else pending

    def end(self, error: ServiceError) -> None:
        """End the attempt from outside: by the client, by its deadline, by the router's stop."""
        self._inbox.put_nowait((None, error))

    async def run(self) -> AsyncGenerator[Output, None]:
        """The answer as it comes; returns when it is whole (``Marks.decode_finished``).

        Raises:
            LegFailure: a leg failed, the request has not.
            ServiceError: whatever ended the request from outside.
        """
        try:
            while self._marks.decode_finished is None:
                leg, event = await self._inbox.get()
                if isinstance(event, ServiceError):
                    self._fail(leg, event)
                elif isinstance(event, wire.PrefillEvent):
                    assert leg is not None
                    self._follow_prefill(leg, event)
                elif (output := self._follow_decode(event)) is not None and _says_something(output):
                    yield output
            await self._settle()
        finally:
            self.close()

    def close(self) -> None:
        """Stop the legs that still run. Safe to call twice."""
        if self._deadline is not None:
            self._deadline.cancel()
        for leg in (self._prefill, self._decode):
            if leg is not None and leg.is_running:
                leg.is_running = False
                leg.link.stop(self._work_id)

    def _sink(self, leg: _Leg) -> Callable[[Event | ServiceError], None]:
        return lambda event: self._inbox.put_nowait((leg, event))

    def _fail(self, leg: _Leg | None, error: ServiceError) -> None:
        """Raise, unless it is the prefill leg and its part is over."""
        if leg is None:
            raise error
        leg.is_running = False
        if leg is self._decode or self._needs_prefill():
            legs = [each.link for each in (self._decode, self._prefill) if each is not None]
            living = frozenset(e.instance.instance_id for e in legs if not e.is_broken)
            raise LegFailure(error, any(each.has_died for each in legs), living)

    def _needs_prefill(self) -> bool:
        return self._record.state in (RequestState.PREFILLING, RequestState.HANDING_OFF)

    def _follow_prefill(self, leg: _Leg, event: wire.PrefillEvent) -> None:
        match event.WhichOneof("event"):
            case "started":
                self._marks.prefill_started = event.started
            case "done":
                self._end_leg(leg)
                self._marks.prefill_done = event.done
                if self._record.state is RequestState.HANDING_OFF:
                    self._record.advance(RequestEvent.JOIN)
            case "failed":
                self._end_leg(leg)
                self._fail(leg, _leg_error(event.failed))

    def _follow_decode(self, event: wire.DecodeEvent) -> Output | None:
        match event.WhichOneof("event"):
            case "tokens":
                self._note_tokens()
                return event.tokens
            case "choice_finished":
                return event.choice_finished
            case "finished":
                self._end_leg(self._decode)
                self._marks.finished_s = self._clock()
                self._marks.decode_finished = event.finished
                if _says_something(event.finished.last):
                    self._note_tokens()
                return event.finished.last
            case "failed":
                self._end_leg(self._decode)
                self._fail(self._decode, _leg_error(event.failed))
        return None

    def _note_tokens(self) -> None:
        """The first token may be ahead of its KV; a second one cannot be."""
        state = self._record.state
        if state is RequestState.PREFILLING:
            reader = self._prefill or self._decode
            self.prefill_s = reader.link.computed(self._work_id)
            in_flight = self._prefill is not None and self._marks.prefill_done is None
            self._record.advance(RequestEvent.FIRST_TOKEN if in_flight else RequestEvent.JOIN)
        elif state is RequestState.HANDING_OFF:
            self._record.advance(RequestEvent.JOIN)

    def _end_leg(self, leg: _Leg) -> None:
        leg.is_running = False
        leg.link.done(self._work_id)

    async def _settle(self) -> None:
        """The answer is whole; hear the prefill leg's report if it is about to come."""
        leg = self._prefill
        try:
            async with asyncio.timeout(FINISH_GRACE_S):
                while leg is not None and leg.is_running:
                    _, event = await self._inbox.get()
                    if isinstance(event, ServiceError):
                        return  # whatever it is, it came too late to matter
                    if isinstance(event, wire.PrefillEvent):
                        self._follow_prefill(leg, event)
        except (TimeoutError, ServiceError, LegFailure):
            return  # no report, or one of a failure that came too late to matter


def _says_something(output: Output) -> bool:
    if isinstance(output, public.ChoiceFinished):
        return True
    return bool(output.token_ids or output.text or output.prompt_logprobs)


def _leg_error(failed: wire.WorkFailed) -> ServiceError:
    """Why a leg failed. Only the client's own end may be called an abort or its deadline."""
    error = from_code(failed.code, failed.message)
    if isinstance(error, (Aborted, DeadlineExceeded)):
        return Unavailable(failed.message)
    return error
