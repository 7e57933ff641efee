"""The parts of an instance that start, drain and stop: engine thread, services, snapshots.

Used by ``services.worker.app`` only, which knows their order.
"""

import asyncio
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from engine.loop import Engine
from kvtransfer.source import KvSource
from kvtransfer.stats import EndpointStats
from kvtransfer.target import KvTarget
from kvtransfer.transports.mounted import add_kv_transfer_to_server
from kvtransfer.transports.remote import RemoteConnector
from kvtransfer.transports.throttle import Throttle, throttled
from protos import worker_pb2_grpc
from services.decode.service import DecodeService
from services.prefill.service import PrefillService
from services.runtime.engine_port import EnginePort
from services.runtime.errors import Internal
from services.runtime.lifecycle import Component
from services.runtime.metrics import WorkerMetrics
from services.runtime.server import token_metadata
from services.runtime.settings import Role, WorkerConfig
from services.worker.build import LoadedModel

SNAPSHOT_S = 0.25
LOOK_S = 1.0
HANG_S = 10.0
"""A step that takes so long will not end: the process does, and a new one takes its place."""


class EngineThread(Component):
    """The step thread; ends when everything that could ask it has stopped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def start(self) -> None:
        self._engine.start()

    async def watch(self) -> None:
        """Raise when the step thread died, or hangs in one step.

        Looks are counted instead of seconds: a process that was paused has not looked.
        """
        looks, seen = 0, None
        while True:
            await asyncio.sleep(LOOK_S)
            self._engine.raise_bug()
            step = self._engine.step_in_flight
            looks = looks + 1 if step is not None and step == seen else 0
            seen = step
            if looks * LOOK_S >= HANG_S:
                raise Internal(f"the engine hangs: step {step} has not ended in {HANG_S:g} s")

    async def stop(self) -> None:
        await asyncio.to_thread(self._engine.stop)


class Snapshots(Component):
    """Takes a look at the numbers now and then."""

    def __init__(self, take: Callable[[], None]) -> None:
        self._take = take
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="snapshots")

    async def watch(self) -> None:
        assert self._task is not None
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._take()
            await asyncio.sleep(SNAPSHOT_S)


class RoleServices(Component):
    """What an instance of one role serves, over one engine.

    prefill: PrefillService and a KV source. decode: DecodeService and a KV target.
    colocated: DecodeService alone.
    """

    def __init__(
        self,
        config: WorkerConfig,
        instance_id: str,
        loaded: LoadedModel,
        engine: Engine,
        port: EnginePort,
        metrics: WorkerMetrics,
        token: str,
    ) -> None:
        runner, role = loaded.runner, config.role
        metadata = token_metadata(token)
        self._transport = config.transport
        self._health = health.aio.HealthServicer()
        self._source: KvSource | None = None
        self._target: KvTarget | None = None
        self._prefill: PrefillService | None = None
        self._decode: DecodeService | None = None
        identity = (instance_id, runner.model_digest, runner.layout, runner.cache)
        if role is Role.PREFILL:
            connect = RemoteConnector(metadata, transport=config.transport)
            slow = Throttle(config.transport_throttle, config.transport_latency_ms / 1000)
            self._source = KvSource(*identity, throttled(connect, slow))
            self._prefill = PrefillService(engine, port, self._source, metrics)
        else:
            if role is Role.DECODE:
                self._target = KvTarget(*identity)
            self._decode = DecodeService(engine, port, self._target, loaded.tokenizer, metrics)

    def mount(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._prefill is not None:
            worker_pb2_grpc.add_PrefillServicer_to_server(self._prefill, server)
        if self._decode is not None:
            worker_pb2_grpc.add_DecodeServicer_to_server(self._decode, server)
        if self._target is not None:
            add_kv_transfer_to_server(self._target, server, self._transport)

    def handoffs_active(self) -> int:
        """Handoffs that have not ended."""
        ends = (self._source, self._target)
        return sum(end.stats().handoffs_active for end in ends if end is not None)

    def source_stats(self) -> EndpointStats:
        """What was sent; nothing by an instance that is no source."""
        return self._source.stats() if self._source is not None else EndpointStats(0, 0)

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        await self._health.set("", status.SERVING if serving else status.NOT_SERVING)

    async def stop(self) -> None:
        """Every request has been cancelled; returns when its blocks are released."""
        for end in (self._source, self._target):
            if end is not None:
                await end.aclose()
        for service in (self._prefill, self._decode):
            if service is not None:
                await service.settle()
