"""What an instance serves in its role, and another role in its place while it runs.

Every service is mounted once, when the server is made, and forwards to what the present role has:

    prefill      PrefillService over a KV source
    decode       DecodeService over a KV target
    colocated    DecodeService alone

Engine, KV cache and prefix cache stay; only what is around them is built anew. Knows nothing of
the router: whoever changes a role says so there. Used by ``services.worker.app``.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from engine.core import EngineCore
from kvtransfer.errors import LinkLost
from kvtransfer.source import KvSource
from kvtransfer.stats import EndpointStats
from kvtransfer.target import KvTarget
from kvtransfer.transports.interface import ControlStream
from kvtransfer.transports.mounted import add_kv_transfer_to_server
from kvtransfer.transports.remote import RemoteConnector
from kvtransfer.transports.throttle import Throttle, throttled
from protos import worker_pb2 as wire
from protos import worker_pb2_grpc
from services.decode.service import DecodeService
from services.prefill.service import PrefillService
from services.runtime.engine_port import EnginePort
from services.runtime.errors import FailedPrecondition, ServiceError
from services.runtime.lifecycle import Component
from services.runtime.metrics import WorkerMetrics
from services.runtime.server import token_metadata
from services.runtime.settings import Role, WorkerConfig
from services.runtime.tls import channel_credentials, channel_name
from services.worker.build import LoadedModel


@dataclass(frozen=True, slots=True)
class _Present:
    """What the present role has."""

    role: Role
    source: KvSource | None = None
    target: KvTarget | None = None
    prefill: PrefillService | None = None
    decode: DecodeService | None = None


class RoleServices(Component):
    """The services of an instance over one engine."""

    def __init__(
        self,
        config: WorkerConfig,
        instance_id: str,
        loaded: LoadedModel,
        engine: EngineCore,
        port: EnginePort,
        metrics_for: Callable[[Role], WorkerMetrics],
        token: str,
    ) -> None:
        runner = loaded.runner
        self._identity = (instance_id, runner.model_digest, runner.layout, runner.cache)
        self._tokenizer = loaded.tokenizer
        self._engine = engine
        self._port = port
        self._metrics_for = metrics_for
        self._transport = config.transport
        self._slow = Throttle(config.transport_throttle, config.transport_latency_ms / 1000)
        self._metadata = token_metadata(token)
        self._tls = config.internal_tls
        self._health = health.aio.HealthServicer()
        self._present = self._build(config.role)

    @property
    def role(self) -> Role:
        return self._present.role

    async def change(self, role: Role) -> None:
        """Serve another role. No request may be running: what still is ends with its handoff."""
        before = self._present
        await self._close(before)
        self._present = self._build(role)

    def evict(self, reason: ServiceError) -> None:
        """End every request with ``reason``; their routers take them elsewhere."""
        for service in (self._present.prefill, self._present.decode):
            if service is not None:
                service.evict(reason)

    def mount(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        worker_pb2_grpc.add_PrefillServicer_to_server(_Prefill(self), server)
        worker_pb2_grpc.add_DecodeServicer_to_server(_Decode(self), server)
        add_kv_transfer_to_server(_Target(self), server, self._transport)

    def handoffs_active(self) -> int:
        """Handoffs that have not ended."""
        ends = (self._present.source, self._present.target)
        return sum(end.stats().handoffs_active for end in ends if end is not None)

    def source_stats(self) -> EndpointStats:
        """What was sent; nothing by an instance that is no source."""
        source = self._present.source
        return source.stats() if source is not None else EndpointStats(0, 0)

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        await self._health.set("", status.SERVING if serving else status.NOT_SERVING)

    async def stop(self) -> None:
        """Every request has been cancelled; returns when its blocks are released."""
        await self._close(self._present)

    # Called by the mounted services

    @property
    def prefill(self) -> PrefillService:
        """Raises: FailedPrecondition: not in this role."""
        if self._present.prefill is None:
            raise FailedPrecondition(f"this instance reads no prompts: its role is {self.role}")
        return self._present.prefill

    @property
    def decode(self) -> DecodeService:
        """Raises: FailedPrecondition: not in this role."""
        if self._present.decode is None:
            raise FailedPrecondition(f"this instance writes no answers: its role is {self.role}")
        return self._present.decode

    @property
    def target(self) -> KvTarget:
        """Raises: LinkLost: not in this role."""
        if self._present.target is None:
            raise LinkLost(f"this instance takes no handoffs: its role is {self.role}")
        return self._present.target

    # Inside

    def _build(self, role: Role) -> _Present:
        metrics = self._metrics_for(role)
        if role is Role.PREFILL:
            connect = RemoteConnector(
                self._metadata,
                lambda: channel_credentials(self._tls),
                self._transport,
                channel_name(self._tls),
            )
            source = KvSource(*self._identity, throttled(connect, self._slow))
            prefill = PrefillService(self._engine, self._port, source, metrics)
            return _Present(role, source=source, prefill=prefill)
        target = KvTarget(*self._identity) if role is Role.DECODE else None
        decode = DecodeService(self._engine, self._port, target, self._tokenizer, metrics)
        return _Present(role, target=target, decode=decode)

    async def _close(self, present: _Present) -> None:
        for end in (present.source, present.target):
            if end is not None:
                await end.aclose()
        for service in (present.prefill, present.decode):
            if service is not None:
                await service.settle()


class _Prefill(worker_pb2_grpc.PrefillServicer):
    """Forwards to the present prefill service."""

    def __init__(self, services: RoleServices) -> None:
        self._services = services

    async def Run(
        self, request_iterator: AsyncIterator[wire.PrefillCommand], context: Any
    ) -> AsyncIterator[wire.PrefillEvents]:
        try:
            service = self._services.prefill
        except FailedPrecondition as error:
            await context.abort(error.codes.grpc, str(error))
        async for events in service.Run(request_iterator, context):
            yield events


class _Decode(worker_pb2_grpc.DecodeServicer):
    """Forwards to the present decode service."""

    def __init__(self, services: RoleServices) -> None:
        self._services = services

    async def Run(
        self, request_iterator: AsyncIterator[wire.DecodeCommand], context: Any
    ) -> AsyncIterator[wire.DecodeEvents]:
        try:
            service = self._services.decode
        except FailedPrecondition as error:
            await context.abort(error.codes.grpc, str(error))
        async for events in service.Run(request_iterator, context):
            yield events


class _Target:
    """Forwards to the present KV target; implements ``KvEndpoint``."""

    def __init__(self, services: RoleServices) -> None:
        self._services = services

    async def serve_control(self, stream: ControlStream) -> None:
        await self._services.target.serve_control(stream)

    async def serve_data(
        self, source_instance_id: str, messages: AsyncIterator[bytes | memoryview]
    ) -> None:
        await self._services.target.serve_data(source_instance_id, messages)
