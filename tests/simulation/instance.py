"""One life of an instance: the real engine, KV endpoint and service of its role, in a process.

Another life has another id and an empty cache, as another process would. Knows how its parts are
joined, which in production ``services.worker`` does; what goes wrong is its caller's.
"""

import asyncio
import functools
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.mock_runner import MockRunner
from engine.tokenizer import ByteTokenizer
from kvtransfer.errors import LinkLost
from kvtransfer.source import KvSource
from kvtransfer.target import KvTarget
from kvtransfer.transports.interface import Link
from services.decode.service import DecodeService
from services.prefill.service import PrefillService
from services.router.membership import LOST_AFTER_S, Instance, Load
from services.runtime.engine_port import EnginePort
from services.runtime.metrics import WorkerMetrics, new_registry
from services.runtime.settings import Role
from tests.simulation.engine import SteppedEngine, StepTimes
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import Broken, Connection, Network
from tests.simulation.streams import KvLink, Mischief, serve_kv, serve_run

MODEL = "mock"
ROUTER_ADDRESS = "router"
NUM_LAYERS = 2
BLOCK_SIZE = 16
HEARTBEAT_S = LOST_AFTER_S / 3
"""Less often than in production, where it tells the load, too: it would be half of all events."""
_RETRY_S = 0.25


@functools.cache
def _metrics(role: Role) -> WorkerMetrics:
    """Shared: making them takes longer than a whole life."""
    return WorkerMetrics.create(new_registry(), MODEL, role, role.value)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all instances of a run share."""

    loop: VirtualLoop
    network: Network
    times: StepTimes
    mischief: Mischief
    engine: EngineConfig
    num_blocks: int


class SimulatedInstance:
    """One process with an engine."""

    def __init__(self, world: Surroundings, name: str, role: Role, life: int) -> None:
        self.name = name
        self.role = role
        self.instance_id = f"{name}.{life}"
        self.process = Process(world.loop, self.instance_id)
        self._world = world
        self.runner = MockRunner(
            world.num_blocks, BLOCK_SIZE, NUM_LAYERS, max_context=world.num_blocks * BLOCK_SIZE
        )
        self.port = EnginePort(world.loop, lambda record: None)
        self.engine = SteppedEngine(
            world.engine, self.runner, self.port, world.times, world.loop, self._happened
        )
        identity = (
            self.instance_id, self.runner.model_digest, self.runner.layout, self.runner.cache
        )  # fmt: skip
        clock, metrics = world.loop.time, _metrics(role)
        self.source: KvSource | None = None
        self.target: KvTarget | None = None
        self.service: PrefillService | DecodeService
        self._seen_version = -1
        self._published: dict[bytes, int] = {}
        if role is Role.PREFILL:
            self.source = KvSource(*identity, self._connect, clock)
            self.service = PrefillService(self.engine, self.port, self.source, metrics, clock)
        else:
            self.target = KvTarget(*identity, clock) if role is Role.DECODE else None
            self.service = DecodeService(
                self.engine, self.port, self.target, ByteTokenizer(), metrics, clock
            )

    def start(self) -> None:
        """Listen, step, register."""
        self._world.network.listen(self.name, self.process, self._serve)
        self.process.spawn(self.engine.run())
        self.process.spawn(self._belong())

    def _happened(self, what: str) -> None:
        self._world.network.happened(f"{self.instance_id}: {what}")

    def describe(self) -> Instance:
        return Instance(
            instance_id=self.instance_id,
            role=self.role,
            address=self.name,
            metrics_address=self.name,
            model=MODEL,
            model_digest=self.runner.model_digest,
            kv_layout=self.runner.layout,
            max_context=self.runner.max_context,
            max_sequence_tokens=self.runner.num_blocks * BLOCK_SIZE,
        )

    def load(self) -> Load:
        load = self.engine.load()
        return Load(
            blocks_total=load.blocks.total,
            blocks_free=load.blocks.free,
            blocks_cached=load.blocks.cached,
            blocks_held=load.blocks.held,
            requests_running=load.requests_running,
            requests_waiting=load.requests_waiting,
            handoffs_active=self.num_handoffs,
        )

    @property
    def num_handoffs(self) -> int:
        """Handoffs that have not ended."""
        ends = (self.source, self.target)
        return sum(end.stats().handoffs_active for end in ends if end is not None)

    def has_changed(self) -> bool:
        """Whether its blocks may have moved since the last time."""
        version = self.engine.version
        changed, self._seen_version = version != self._seen_version, version
        return changed

    def new_publications(self) -> list[tuple[bytes, int]]:
        """(hash, block) pairs that entered the prefix index since the last time."""
        now = self.engine.kv.published()
        new = [(h, b) for h, b in now.items() if self._published.get(h) != b]
        self._published = now
        return new

    async def _serve(self, connection: Connection, greeting: Any) -> None:
        """Somebody dialled: the router for work, a source to hand over."""
        if greeting == "run":
            await serve_run(self.service, self.process, connection)
        elif self.target is not None:
            await serve_kv(self.target, greeting, connection, self._world.mischief)

    async def _connect(
        self, address: str, source_instance_id: str, target_instance_id: str
    ) -> Link:
        try:
            connection = await self._world.network.dial(
                self.process, address, source_instance_id, num_streams=2
            )
        except Broken as error:
            raise LinkLost(str(error)) from error
        return KvLink(connection, self._world.mischief)

    async def _belong(self) -> None:
        """Register, heartbeat, and register again where the router has forgotten us."""
        known, sequence = False, 0
        while True:
            news = self.engine.cache_news(sequence)
            asked = ("heartbeat", self.instance_id, self.load(), news)
            question = asked if known else ("register", self.describe(), self.load())
            try:
                answer = await self._world.network.ask(self.process, ROUTER_ADDRESS, question)
            except Broken:
                await asyncio.sleep(_RETRY_S)
                continue
            known, sequence = answer
            if known:
                await asyncio.sleep(HEARTBEAT_S)
