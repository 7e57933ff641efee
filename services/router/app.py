"""A router process: everything put together, started and stopped.

    public gRPC    Inference, Status, health, reflection
    public HTTP    OpenAI API, /health, /ready, /metrics
    internal gRPC  Cluster, Status, health; asks for the cluster token

Imports no torch, transitively. Called by ``services.launch`` and by tests.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from services.router.admission import Admission
from services.router.cluster_service import ClusterService, StatusService
from services.router.disaggregation import Rules
from services.router.doors import GrpcDoor, HttpDoor
from services.router.fleet import Fleet
from services.router.health import Health
from services.router.http_server import HttpServer
from services.router.inference import InferenceService
from services.router.intake import Intake
from services.router.keys import Gate, Keyring
from services.router.membership import InstanceState, Snapshot
from services.router.observing import Observing
from services.router.openai_api import OpenAiApi
from services.router.served_model import ServedModel
from services.router.serving import Serving
from services.router.streams import dial_with
from services.router.telemetry import Telemetry
from services.router.traces import Traces
from services.runtime.errors import Unavailable
from services.runtime.lifecycle import Component, Stack, StopSignals, run_until_stopped
from services.runtime.metrics import RouterMetrics, new_registry
from services.runtime.server import GrpcServer, cluster_token
from services.runtime.settings import PlacementPolicy, RouterConfig
from services.runtime.vllm_names import BothNames

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
STATUS = cluster_pb2.DESCRIPTOR.services_by_name["Status"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


@dataclass(frozen=True, slots=True)
class RouterAddresses:
    """Where a running router answers, ``host:port`` each."""

    grpc: str
    http: str
    internal: str


class Router(Component):
    """One router. Needs a validated config, and the cluster token."""

    def __init__(self, config: RouterConfig, model: ServedModel, token: str) -> None:
        self._admission = Admission(config.max_requests)
        registry, measured = new_registry(), CollectorRegistry()
        registry.register(BothNames(measured.collect))
        self._metrics = RouterMetrics.create(measured, model.model_id, secrets.token_hex(4))
        self._health = Health((INFERENCE,))
        self._fleet = Fleet(model.model_id, dial_with(token, config.internal_tls), self._follow)
        self._telemetry = Telemetry.open()
        tell = self._telemetry.tell if self._telemetry is not None else None
        traces = Traces(model.model_id, config.trace_requests, tell)
        self._serving = serving = Serving(
            self._fleet,
            self._admission,
            Intake(model),
            self._metrics,
            model.max_context,
            Rules(
                config.disaggregate_from,
                PlacementPolicy(config.placement),
                config.ttft_slo_s,
                config.tpot_slo_s,
                config.max_wait_s,
            ),
            traces,
        )
        inference = InferenceService(model, serving)
        status = StatusService(model.model_id, self._fleet, config.launcher)
        cluster = ClusterService(self._fleet)

        def mount_public(server: grpc.aio.Server) -> None:
            inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
            cluster_pb2_grpc.add_StatusServicer_to_server(status, server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
            names = (INFERENCE, STATUS, HEALTH, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)

        def mount_internal(server: grpc.aio.Server) -> None:
            cluster_pb2_grpc.add_ClusterServicer_to_server(cluster, server)
            cluster_pb2_grpc.add_StatusServicer_to_server(status, server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)

        insecure = config.insecure
        self._internal = GrpcServer(
            mount_internal,
            config.internal_host,
            config.internal_port,
            token=token,
            insecure=insecure,
            tls=config.internal_tls,
        )
        http = OpenAiApi(model, serving).app()
        Observing(registry, serving.refresh_gauges, self._fleet.snapshot, traces).mount(http)
        app: ASGIApp = http
        doors: list[grpc.aio.ServerInterceptor] = []
        if config.api_keys:
            keyring, gate = Keyring(config.api_keys), Gate()
            doors.append(GrpcDoor(keyring, gate))
            app = HttpDoor(app, keyring, gate)
        tls = config.public_tls
        self._grpc = GrpcServer(
            mount_public, config.host, config.grpc_port, insecure=insecure, tls=tls, doors=doors
        )
        self._http = HttpServer(app, config.host, config.http_port, insecure=insecure, tls=tls)
        # Stopped in reverse: the faces end before the streams to the instances do.
        self._parts = Stack(self._fleet, self._internal, self._grpc, self._http)

    @property
    def addresses(self) -> RouterAddresses:
        """Real once it has started."""
        return RouterAddresses(self._grpc.address, self._http.address, self._internal.address)

    async def start(self) -> None:
        self._follow(self._fleet.snapshot())
        await self._parts.start()

    async def watch(self) -> None:
        await self._parts.watch()

    async def drain(self) -> None:
        """Refuse new requests, say so to health checks, wait for those that run."""
        self._admission.close()
        self._follow(self._fleet.snapshot())
        await self._admission.idle()

    async def stop(self) -> None:
        """Whoever still waits for an answer is told; nothing of it is left."""
        self._admission.close()
        self._serving.end_all(Unavailable("the router is stopping"))
        await self._parts.stop()
        if self._telemetry is not None:
            await asyncio.to_thread(self._telemetry.close)

    def _follow(self, snapshot: Snapshot) -> None:
        """The cluster changed: health and gauges follow."""
        self._health.tell(self._admission.is_open and snapshot.can_admit)
        for state in InstanceState:
            count = sum(view.state is state for view in snapshot.instances)
            self._metrics.instances(state.value).set(count)


async def run_router(config: RouterConfig, on_ready: Callable[[RouterAddresses], None]) -> None:
    """Serve until SIGINT or SIGTERM, then drain and stop. Only in the main thread.

    Args:
        on_ready: told once, when all ports answer.

    Raises:
        Exception: it could not start, or failed later; ``to_service_error`` has the reason.
    """
    config.validate()
    token = cluster_token()
    model = await asyncio.to_thread(ServedModel.open, config.model)
    router = Router(config, model, token)

    async def ready() -> None:
        on_ready(router.addresses)

    with StopSignals() as signals:
        await run_until_stopped(
            router,
            signals.stop,
            on_ready=ready,
            hurry=signals.hurry,
            drain_timeout_s=config.drain_timeout_s,
        )
