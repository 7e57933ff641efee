"""One instance: an engine, a KV endpoint, and the services of its role on one internal port.

    1  load      weights and KV cache, on a thread
    2  serve     the engine steps, the services of the role answer
    3  register  with every router, then heartbeat
    4  drain     say so, finish what runs
    5  stop      goodbye, server, handoffs, engine: the reverse of the start

Knows the order; what each part does is in ``parts`` and ``registration``. Called by the command
line and by launchers.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from engine.loop import Engine
from kvtransfer.wire import layout_to_proto
from protos import cluster_pb2, cluster_pb2_grpc
from services.runtime.address import join_address
from services.runtime.engine_port import EnginePort
from services.runtime.errors import Unavailable
from services.runtime.lifecycle import Component, Stack, StopSignals, run_until_stopped
from services.runtime.metrics import new_registry
from services.runtime.metrics_server import MetricsServer
from services.runtime.server import GrpcServer, cluster_token
from services.runtime.settings import Role, WorkerConfig
from services.worker.build import LoadedModel, ReadModel, build_engine, load_model, read_model
from services.worker.control import InstanceService
from services.worker.observe import Observer, load_message, news_message
from services.worker.parts import EngineThread, Registrations, Snapshots
from services.worker.registration import Registration
from services.worker.role import RoleServices

DRAIN_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class WorkerAddresses:
    """Where a started instance listens, host:port."""

    grpc: str
    metrics: str


@dataclass(frozen=True, slots=True)
class _Parts:
    """A loaded instance."""

    loaded: LoadedModel
    engine: Engine
    services: RoleServices
    server: GrpcServer
    metrics_server: MetricsServer
    registrations: Registrations
    stack: Stack


class Worker(Component):
    """One instance, from its configuration to its end.

    Args:
        read: its model, where that is in memory already.
        on_leave: called when its operator wants it to go.

    Raises:
        InvalidArgument: an option is wrong.
        FailedPrecondition: there is no cluster token.
    """

    def __init__(
        self,
        config: WorkerConfig,
        read: ReadModel | None = None,
        on_leave: Callable[[], None] = lambda: None,
    ) -> None:
        config.validate()
        self._config = config
        self._read = read
        self._on_leave = on_leave
        self._token = cluster_token()
        self._parts: _Parts | None = None
        self._is_registered = False
        self._draining = False
        self._changing = asyncio.Lock()
        self.instance_id = f"{config.role}-{secrets.token_hex(4)}"

    async def start(self) -> None:
        """Load, serve and register; returns when a router knows this instance.

        Raises:
            ModelError: the model cannot be served.
            CapacityError: the KV cache is too small.
            ServiceError: a port is taken, or a router refused this instance.
        """
        self._parts = self._assemble(await asyncio.to_thread(self._load))
        await self._parts.stack.start()
        await self._parts.services.set_serving(True)
        self._is_registered = True

    async def watch(self) -> None:
        await self._here.stack.watch()

    async def drain(self) -> None:
        """Take no more requests, finish those that run."""
        await self.take_no_more()
        await self._idle()

    async def stop(self) -> None:
        """What still runs goes on elsewhere."""
        if self._parts is not None:
            self._parts.services.evict(Unavailable("the instance stops"))
            await self._parts.stack.stop()

    # ---- what an operator may ask, see ``control`` ------------------------------------------

    async def take_no_more(self, *, now: bool = False) -> None:
        """Say to every router that no more requests should come.

        Args:
            now: those that run go on elsewhere.
        """
        self._draining = True
        await self._here.services.set_serving(False)
        await self._here.registrations.tell()
        if now:
            self._here.services.evict(Unavailable("the instance drains"))

    async def take_again(self) -> None:
        """Requests may come again."""
        self._draining = False
        await self._here.services.set_serving(True)
        await self._here.registrations.tell()

    async def change_role(self, role: Role) -> None:
        """Serve another role, once what runs has ended. Engine and prefix cache stay.

        Raises:
            Unavailable: requests still ran when the drain timeout was over; nothing has changed.
            FailedPrecondition: a router refused it.
        """
        async with self._changing:
            if role is self._here.services.role:
                return
            await self.take_no_more()
            try:
                async with asyncio.timeout(self._config.drain_timeout_s):
                    await self._idle()
            except TimeoutError:
                await self.take_again()
                waited = f"{self._config.drain_timeout_s:g} s"
                raise Unavailable(
                    f"requests still run after {waited}, so the role stays: drain --now first"
                ) from None
            await self._here.services.change(role)
            self._draining = False
            await self._here.services.set_serving(True)
            await self._here.registrations.renew()

    def leave(self) -> None:
        """Drain, then go."""
        self._on_leave()

    # ---- inside -----------------------------------------------------------------------------

    @property
    def _here(self) -> "_Parts":
        assert self._parts is not None
        return self._parts

    async def _idle(self) -> None:
        """Until no request is here."""
        while True:
            load = self._here.engine.load()
            busy = load.requests_running or load.requests_waiting
            if not busy and not self._here.services.handoffs_active():
                return
            await asyncio.sleep(DRAIN_POLL_S)

    @property
    def addresses(self) -> WorkerAddresses:
        assert self._parts is not None
        host = self._config.advertise_host
        server, metrics_server = self._parts.server, self._parts.metrics_server
        if not host:
            return WorkerAddresses(server.address, metrics_server.address)
        return WorkerAddresses(
            join_address(host, server.port), join_address(host, metrics_server.port)
        )

    def _load(self) -> LoadedModel:
        config = self._config
        return load_model(self._read or read_model(config.model, config.engine), config.engine)

    def _assemble(self, loaded: LoadedModel) -> _Parts:
        config, loop = self._config, asyncio.get_running_loop()
        registry = new_registry()
        runner = loaded.runner
        observer = Observer(
            registry,
            loaded.model_id,
            self.instance_id,
            runner.layout.block_size,
            runner.num_blocks,
        )
        port = EnginePort(loop, observer.stepped)
        engine = build_engine(loaded, config.engine, port)
        services = RoleServices(
            config, self.instance_id, loaded, engine, port, observer.metrics_for, self._token
        )
        insecure = config.insecure
        metrics_server = MetricsServer(
            registry,
            config.host,
            config.metrics_port,
            is_ready=lambda: self._is_registered and not self._draining,
            # Plain in any case: it says nothing of anybody's prompts, and probes read it.
            insecure=insecure or config.internal_tls.is_on,
        )

        def mount(server: grpc.aio.Server) -> None:
            services.mount(server)
            cluster_pb2_grpc.add_InstanceServicer_to_server(InstanceService(self), server)

        server = GrpcServer(
            mount,
            config.host,
            config.port,
            token=self._token,
            insecure=insecure,
            tls=config.internal_tls,
        )
        registrations = Registrations(
            [self._registration(router, engine) for router in config.routers]
        )
        stack = Stack(
            EngineThread(engine),
            services,
            Snapshots(lambda: observer.snapshot(engine.load(), services.source_stats())),
            metrics_server,
            server,
            registrations,
        )
        return _Parts(loaded, engine, services, server, metrics_server, registrations, stack)

    def _registration(self, router: str, engine: Engine) -> Registration:
        return Registration(
            router,
            self._token,
            self.instance_id,
            self._describe,
            self.load,
            lambda sequence: news_message(engine.cache_news(sequence)),
            self._config.internal_tls,
        )

    def load(self) -> cluster_pb2.InstanceLoad:
        """What the router hears with every heartbeat."""
        assert self._parts is not None
        return load_message(
            self._parts.engine.load(), self._parts.services.handoffs_active(), self._draining
        )

    def _describe(self) -> cluster_pb2.RegisterRequest:
        assert self._parts is not None
        runner, layout = self._parts.loaded.runner, self._parts.loaded.runner.layout
        return cluster_pb2.RegisterRequest(
            instance_id=self.instance_id,
            role=cluster_pb2.Role.Name(self._parts.services.role.number),
            address=self.addresses.grpc,
            metrics_address=self.addresses.metrics,
            model=self._parts.loaded.model_id,
            model_digest=runner.model_digest,
            kv_layout=layout_to_proto(layout),
            max_context=runner.max_context,
            max_sequence_tokens=runner.num_blocks * layout.block_size,
            load=self.load(),
            max_gap_s=self._config.engine.max_gap_s,
        )


async def run_worker(
    config: WorkerConfig,
    on_ready: Callable[[WorkerAddresses], Awaitable[None]],
    read: ReadModel | None = None,
) -> None:
    """One instance until SIGINT or SIGTERM; ``on_ready`` hears where it listens."""
    with StopSignals() as signals:
        worker = Worker(config, read, signals.stop.set)

        async def ready() -> None:
            await on_ready(worker.addresses)

        await run_until_stopped(
            worker,
            signals.stop,
            on_ready=ready,
            hurry=signals.hurry,
            drain_timeout_s=config.drain_timeout_s,
        )
