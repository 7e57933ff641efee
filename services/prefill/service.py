"""Prefill: read a prompt, sample its first token, hand both to the decode instance.

The life of a request here:

    1  start     StartPrefill arrives; the prompt is queued in the engine, ungranted
    2  picked    the scheduler gives it blocks: OFFER goes to the decode instance, which has been
                 told all along that one will come
    3  granted   the decode instance has blocks, too: from now on it may be computed
    4  layers    each layer of each chunk is on its way while the next one computes
    5  first     the first token, with several answers that of each, is sampled and sent ahead of
                 the KV still in flight
    6  released  everything landed; our hold on the blocks ends, the prefix cache keeps them

Whatever ends it early, the handoff is cancelled and drained before a block is freed.
Knows nothing of answers, text or clients. Mounted by ``services.worker``.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from engine.core import EngineCore
from engine.plan import EngineEvent, Failed, Picked, Sampled
from engine.request import Purpose, Request, forks_of
from kvtransfer.source import KvSource, SourceHandoff
from kvtransfer.stats import HandoffStats, layer_lags
from protos import worker_pb2 as wire
from protos import worker_pb2_grpc
from services.runtime.background import Background, unless
from services.runtime.engine_port import EnginePort
from services.runtime.errors import Internal, ServiceError, to_service_error
from services.runtime.metrics import WorkerMetrics
from services.runtime.session import Session
from services.runtime.work import as_attempt, logprobs_message, parse_work_request


class _Progress:
    """What the engine tells about one prompt, as futures that are awaited in turn."""

    def __init__(self, request_ids: tuple[str, ...]) -> None:
        loop = asyncio.get_running_loop()
        self._request_ids = request_ids
        self._firsts: dict[str, Sampled] = {}
        self.picked: asyncio.Future[Picked] = loop.create_future()
        self.sampled: asyncio.Future[list[Sampled]] = loop.create_future()
        """The first token of every answer."""

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case Picked():
                if not self.picked.done():
                    self.picked.set_result(event)
            case Sampled():
                self._firsts[event.request_id] = event
                if len(self._firsts) == len(self._request_ids) and not self.sampled.done():
                    self.sampled.set_result([self._firsts[each] for each in self._request_ids])
            case Failed():
                for future in (self.picked, self.sampled):
                    if not future.done():
                        future.set_exception(Internal(event.reason))
                        future.exception()  # the other one may never be awaited


class PrefillService(worker_pb2_grpc.PrefillServicer):
    """Glue between one engine and one KV source."""

    def __init__(
        self,
        engine: EngineCore,
        port: EnginePort,
        source: KvSource,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._port = port
        self._source = source
        self._metrics = metrics
        self._clock = clock
        self._background = Background()
        self._attempts = itertools.count()
        self._sessions: set[Session[wire.PrefillEvent]] = set()

    async def Run(
        self, request_iterator: AsyncIterator[wire.PrefillCommand], context: Any
    ) -> AsyncIterator[wire.PrefillEvents]:
        session: Session[wire.PrefillEvent] = Session()
        self._sessions.add(session)

        def ended(_: Any) -> None:
            self._sessions.discard(session)
            session.close()

        context.add_done_callback(ended)

        def handle(command: wire.PrefillCommand) -> None:
            if command.HasField("start"):
                start = command.start
                session.start(start.request.request_id, self._serve(session, start))
            elif command.HasField("abort"):
                session.abort(command.abort.request_id)

        async for batch in session.run(request_iterator, handle):
            yield wire.PrefillEvents(events=batch)

    def evict(self, reason: ServiceError) -> None:
        """End every request with ``reason``."""
        for session in self._sessions:
            session.end_all(lambda request_id: _failed_event(request_id, reason))

    async def settle(self) -> None:
        """Until the blocks of every ended request are released."""
        await self._background.settle()

    async def _serve(self, session: Session[wire.PrefillEvent], start: wire.StartPrefill) -> None:
        """One request, with its one terminal event."""
        request_id = start.request.request_id
        event = wire.PrefillEvent(request_id=request_id)
        try:
            event.done.CopyFrom(await self._prefill(session, start))
        except Exception as error:
            event = _failed_event(request_id, to_service_error(error))
        session.emit(event)

    async def _prefill(
        self, session: Session[wire.PrefillEvent], start: wire.StartPrefill
    ) -> wire.PrefillDone:
        request = as_attempt(parse_work_request(start.request), next(self._attempts))
        arrived_s = self._clock()
        request_ids = tuple(each.request_id for each in forks_of(request))
        progress = _Progress(request_ids)
        handoff: SourceHandoff | None = None

        chunks: list[tuple[int, float]] = []

        def on_layer(layer: int, num_tokens: int) -> None:
            if handoff is not None:
                handoff.layer_ready(layer, num_tokens)
            if start.wants_trace and layer == self._source.layout.num_layers - 1:
                chunks.append((num_tokens, self._clock()))

        self._port.subscribe(request.request_id, progress.on_event, on_layer)
        for request_id in request_ids[1:]:
            self._port.subscribe(request_id, progress.on_event)
        try:
            self._engine.submit(request, Purpose.SOURCE)
            self._source.announce(start.handoff_id, start.target_address, start.target_instance_id)
            picked = await progress.picked
            picked_s = self._clock()
            handoff = self._offer(request, start, picked)
            await handoff.granted()
            granted_s = self._clock()
            started = wire.PrefillStarted(
                queue_s=granted_s - arrived_s, grant_s=granted_s - picked_s
            )
            session.emit(wire.PrefillEvent(request_id=start.request.request_id, started=started))
            stats, computed_s = await self._send(request, picked, handoff, progress)
            self._note(request, picked, stats)
            done = wire.PrefillDone(
                prefill_s=computed_s - granted_s,
                handoff_s=stats.transfer_s,
                handoff_hidden_ratio=stats.hidden_ratio,
                handoff_bytes=stats.num_bytes,
                computed_tokens=request.num_known_tokens - picked.num_cached_tokens,
                cached_tokens=picked.num_cached_tokens,
                skipped_tokens=stats.num_held_tokens,
            )
            if start.wants_trace:
                _trace(done, stats, [(count, at_s - granted_s) for count, at_s in chunks])
            return done
        finally:
            for request_id in request_ids:
                self._port.unsubscribe(request_id)
            self._source.cancel(start.handoff_id, "the prefill instance gave the request up")
            self._background.spawn(self._release(request.request_id, handoff))

    async def _send(
        self, request: Request, picked: Picked, handoff: SourceHandoff, progress: _Progress
    ) -> tuple[HandoffStats, float]:
        """From the grant to the release; also the time at which prefill was done."""
        released = asyncio.create_task(handoff.released())
        try:
            for layer in range(self._source.layout.num_layers):
                handoff.layer_ready(layer, picked.num_cached_tokens)
            self._engine.grant(request.request_id)
            first, *others = await unless(progress.sampled, released)
            computed_s = self._clock()
            handoff.first(
                request.num_known_tokens,
                first.token_id,
                picked.num_cached_tokens,
                _details(first, others),
            )
            return await released, computed_s
        finally:
            released.cancel()

    async def _release(self, request_id: str, handoff: SourceHandoff | None) -> None:
        """Free the blocks once nothing reads them any more."""
        if handoff is not None:
            await handoff.drained()
        self._engine.finish(request_id)
        self._port.notify_moved()

    def _note(self, request: Request, picked: Picked, stats: HandoffStats) -> None:
        cached = picked.num_cached_tokens
        self._metrics.prompt_tokens_total("local_cache_hit").inc(cached)
        self._metrics.prompt_tokens_total("local_compute").inc(request.num_known_tokens - cached)
        self._metrics.handoff_time_seconds.observe(stats.transfer_s)
        self._metrics.handoff_hidden_ratio.observe(stats.hidden_ratio)
        for lag_s in layer_lags(stats.sends).values():
            self._metrics.handoff_layer_lag_seconds.observe(lag_s)

    def _offer(self, request: Request, start: wire.StartPrefill, picked: Picked) -> SourceHandoff:
        return self._source.offer(
            handoff_id=start.handoff_id,
            target_address=start.target_address,
            target_instance_id=start.target_instance_id,
            request_id=start.request.request_id,
            num_tokens=request.num_known_tokens,
            block_hashes=self._engine.block_hashes(request),
            block_table=picked.block_table,
        )


def _trace(done: wire.PrefillDone, stats: HandoffStats, chunks: list[tuple[int, float]]) -> None:
    """Add what only traces show; seconds since the grant."""
    for send in stats.sends:
        done.sends.layer.append(send.layer)
        done.sends.written_s.append(send.written_s)
        done.sends.begin_s.append(send.begin_s)
        done.sends.end_s.append(send.end_s)
    for num_tokens, end_s in chunks:
        done.chunks.num_tokens.append(num_tokens)
        done.chunks.end_s.append(end_s)


def _failed_event(request_id: str, error: ServiceError) -> wire.PrefillEvent:
    """The terminal event of a request that failed."""
    failed = wire.WorkFailed(code=error.grpc_code_number, message=str(error))
    return wire.PrefillEvent(request_id=request_id, failed=failed)


def _details(first: Sampled, others: list[Sampled]) -> bytes:
    """What the decode instance must know of the first tokens, beside the id of the first."""
    details = wire.FirstDetails(
        prompt_logprobs=[logprobs_message(record) for record in first.prompt_logprobs],
        candidates=[
            wire.BeamCandidate(token_id=token_id, logprob=logprob)
            for token_id, logprob in first.candidates
        ],
    )
    if first.logprobs is not None:
        details.logprobs.CopyFrom(logprobs_message(first.logprobs))
    for other in others:
        said = details.others.add(token_id=other.token_id)
        if other.logprobs is not None:
            said.logprobs.CopyFrom(logprobs_message(other.logprobs))
    return bytes(details.SerializeToString())
