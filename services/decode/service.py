"""Decode: receive a prompt's KV and first token, write the answer; or read the prompt here, too.

The life of a request that was handed off:

    1  expect    StartDecode and OFFER meet, whichever comes first
    2  reserve   blocks for what is not in our prefix cache; first come, first served; else WAIT
    3  grant     the source may compute and send
    4  first     the first token goes to the client while its KV is still in flight
    5  landed    every layer of every block is here: the sequence joins the batch, and with
                 several answers forks, with beams begins to search
    6  answer    token after token, until the engine or a stop string ends it

Without a handoff the engine prefills the prompt in chunks between its decode steps.
Knows nothing of how a prompt is computed elsewhere. Mounted by ``services.worker``.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from engine.beams import Candidates
from engine.core import EngineCore
from engine.plan import BeamsEnded, Computed, CutShort, EngineEvent, Failed, Picked, Sampled
from engine.request import Purpose, Request, TokenLogprobs, forks_of
from engine.tokenizer import Tokenizer
from kvtransfer.handoff.frames import First
from kvtransfer.target import KvTarget, TargetHandoff
from protos import worker_pb2 as wire
from protos import worker_pb2_grpc
from services.decode.answer import failed_event
from services.decode.choices import Choices
from services.runtime.background import Background, unless
from services.runtime.engine_port import EnginePort
from services.runtime.errors import FailedPrecondition, Internal, ServiceError, to_service_error
from services.runtime.metrics import WorkerMetrics
from services.runtime.session import Session
from services.runtime.work import as_attempt, parse_logprobs, parse_work_request


class DecodeService(worker_pb2_grpc.DecodeServicer):
    """Glue between one engine, one KV target and the routers that want answers."""

    def __init__(
        self,
        engine: EngineCore,
        port: EnginePort,
        target: KvTarget | None,
        tokenizer: Tokenizer,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._engine = engine
        self._port = port
        self._target = target
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._background = Background()
        self._attempts = itertools.count()
        self._sessions: set[Session[wire.DecodeEvent]] = set()

    async def Run(
        self, request_iterator: AsyncIterator[wire.DecodeCommand], context: Any
    ) -> AsyncIterator[wire.DecodeEvents]:
        session: Session[wire.DecodeEvent] = Session()
        self._sessions.add(session)

        def ended(_: Any) -> None:
            self._sessions.discard(session)
            session.close()

        context.add_done_callback(ended)

        def handle(command: wire.DecodeCommand) -> None:
            if command.HasField("start"):
                start = command.start
                session.start(start.request.request_id, self._serve(session, start))
            elif command.HasField("abort"):
                session.abort(command.abort.request_id)

        async for batch in session.run(request_iterator, handle):
            yield wire.DecodeEvents(events=batch)

    def evict(self, reason: ServiceError) -> None:
        """End every request with ``reason``."""
        for session in self._sessions:
            session.end_all(lambda request_id: failed_event(request_id, reason))

    async def settle(self) -> None:
        """Until the blocks of every ended request are released."""
        await self._background.settle()

    async def _serve(self, session: Session[wire.DecodeEvent], start: wire.StartDecode) -> None:
        """One request, with its one terminal event."""
        try:
            request = parse_work_request(start.request)
            choices = Choices(request, self._tokenizer, session.emit, self._clock)
        except Exception as error:
            session.emit(failed_event(start.request.request_id, to_service_error(error)))
            return
        await self._work(start, request, choices)

    async def _work(self, start: wire.StartDecode, request: Request, choices: Choices) -> None:
        attempt = as_attempt(request, next(self._attempts))
        indexes = {each.request_id: i for i, each in enumerate(forks_of(attempt))}

        def on_event(event: EngineEvent) -> None:
            match event:
                case Sampled():
                    if self._push(choices, indexes[event.request_id], event):
                        self._engine.finish(event.request_id)
                case CutShort():
                    choices.cut_short(indexes[event.request_id], event.reason)
                case Computed():
                    choices.searching()
                case BeamsEnded():
                    self._found(choices, event)
                case Picked():
                    choices.picked(event.num_cached_tokens)
                    self._note_prompt(request, event.num_cached_tokens, "local_compute")
                case Failed():
                    choices.fail(Internal(event.reason))

        for request_id in indexes:
            self._port.subscribe(request_id, on_event)
        try:
            if start.handoff_id:
                await self._receive(start, attempt, choices)
            else:
                await self._prefill_here(attempt, choices)
        except Exception as error:
            choices.fail(to_service_error(error))
        finally:
            for request_id in indexes:
                self._port.unsubscribe(request_id)

    async def _prefill_here(self, attempt: Request, choices: Choices) -> None:
        try:
            self._engine.submit(attempt, Purpose.LOCAL)
            await choices.ended()
        finally:
            self._finish(attempt)

    async def _receive(self, start: wire.StartDecode, attempt: Request, choices: Choices) -> None:
        if self._target is None:
            raise FailedPrecondition("this instance takes no handoffs: its role is colocated")
        handoff = self._target.expect(start.handoff_id, start.request.request_id)
        try:
            first = await self._take(handoff, attempt)
            choices.landing(first.num_cached_tokens)
            if attempt.sampling.beam_search is not None:
                candidates = _candidates(first)
                await handoff.landed()
                self._engine.join_beams(attempt.request_id, candidates)
                await choices.ended()
                return
            firsts = _firsts(first, attempt)
            ended = self._push_firsts(choices, attempt, firsts)
            if not choices.has_ended:
                await handoff.landed()
                self._engine.join(attempt.request_id, *(each.token_id for each in firsts))
                for request_id in ended:
                    self._engine.finish(request_id)
                await choices.ended()
        finally:
            self._background.spawn(self._release(attempt, handoff))

    def _push_firsts(self, choices: Choices, attempt: Request, firsts: list[Sampled]) -> list[str]:
        """The first token of every answer goes out at once; who has ended with it."""
        ended = []
        for index, first in enumerate(firsts):
            reason = self._engine.finish_reason(attempt, first.token_id)
            if self._push(choices, index, replace(first, finish_reason=reason)):
                ended.append(first.request_id)
        return ended

    async def _take(self, handoff: TargetHandoff, request: Request) -> First:
        """From the offer to the first token; the KV may still be in flight."""
        offer = await handoff.offered()
        if (offer.num_tokens, offer.block_hashes) != (
            request.num_known_tokens,
            self._engine.block_hashes(request),
        ):
            handoff.refuse("this is not the KV of the prompt that was asked for")
            raise FailedPrecondition("the prefill instance offered another prompt's KV")
        first = asyncio.create_task(handoff.first())
        try:
            while (reservation := self._engine.reserve(request)) is None:
                handoff.wait()
                await unless(self._port.moved(), first)
            handoff.grant(reservation.block_table, reservation.num_cached_tokens)
            self._note_prompt(request, reservation.num_cached_tokens, "handoff")
            return await first
        finally:
            first.cancel()

    def _push(self, choices: Choices, index: int, sampled: Sampled) -> bool:
        """True when that answer has ended."""
        before = choices.num_output_tokens
        has_ended = choices.push(index, sampled)
        self._metrics.output_tokens_total.inc(choices.num_output_tokens - before)
        return has_ended

    def _found(self, choices: Choices, event: BeamsEnded) -> None:
        """A search has ended: its answers are told."""
        before = choices.num_output_tokens
        choices.found(event.hypotheses)
        self._metrics.output_tokens_total.inc(choices.num_output_tokens - before)

    def _finish(self, attempt: Request) -> None:
        """Done with all sequences of an attempt. The first comes first: until it has ended, it
        may still fork."""
        for request in forks_of(attempt):
            self._engine.finish(request.request_id)

    def _note_prompt(self, request: Request, num_cached: int, rest: str) -> None:
        self._metrics.prompt_tokens_total("local_cache_hit").inc(num_cached)
        self._metrics.prompt_tokens_total(rest).inc(request.num_known_tokens - num_cached)

    async def _release(self, attempt: Request, handoff: TargetHandoff) -> None:
        """Free the blocks once nothing writes to them any more."""
        handoff.cancel("the decode instance is done with the request")
        await handoff.drained()
        self._finish(attempt)
        self._port.notify_moved()


def _firsts(first: First, attempt: Request) -> list[Sampled]:
    """The first token of every answer, and with the first what is said of the prompt.

    Raises:
        FailedPrecondition: they are not as many as the answers.
    """
    details = wire.FirstDetails.FromString(first.details)
    told: list[tuple[int, wire.FirstDetails | wire.FirstToken]] = [(first.token_id, details)]
    told += [(each.token_id, each) for each in details.others]
    requests = forks_of(attempt)
    if len(told) != len(requests):
        raise FailedPrecondition(
            f"the prefill instance sent {len(told)} first tokens for {len(requests)} answers"
        )
    firsts = [
        Sampled(request.request_id, token_id, None, _logprobs(message))
        for request, (token_id, message) in zip(requests, told, strict=True)
    ]
    prompt = tuple(parse_logprobs(record) for record in details.prompt_logprobs)
    return [replace(firsts[0], prompt_logprobs=prompt), *firsts[1:]]


def _candidates(first: First) -> Candidates:
    """What a search goes on with.

    Raises:
        FailedPrecondition: nothing.
    """
    details = wire.FirstDetails.FromString(first.details)
    if not details.candidates:
        raise FailedPrecondition("the prefill instance sent no candidates for a beam search")
    return tuple((each.token_id, each.logprob) for each in details.candidates)


def _logprobs(message: wire.FirstDetails | wire.FirstToken) -> TokenLogprobs | None:
    return parse_logprobs(message.logprobs) if message.HasField("logprobs") else None
