"""Instances and a router in virtual time, for ``benchmarks.placement``.

The engine, its scheduler and prefix cache, placement, rates and cache index are the real ones; only
how long a step takes is a model. Knows nothing of traces.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean

from engine.config import EngineConfig
from engine.core import EngineCore, StepRecord
from engine.kv.manager import KvManager
from engine.pace import Pace
from engine.plan import EngineEvent, Picked, Sampled, StepPlan, StepResult
from engine.request import Purpose, Request
from engine.scheduler import Scheduler
from kvtransfer.layout import KvLayout
from services.router.cache_index import CacheIndex
from services.router.disaggregation import Rules
from services.router.membership import (
    HEARTBEAT_INTERVAL_S,
    Instance,
    InstanceState,
    InstanceView,
    Load,
    Pending,
    Snapshot,
)
from services.router.placement import BY_PREFIX, place
from services.router.prediction import Demand
from services.router.rates import Rates
from services.runtime.settings import Role

BLOCK = 16
MODEL = "simulated"


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds that things take."""

    token_s: float
    pair_s: float
    step_s: float
    sequence_s: float
    kv_token_s: float

    def forward_s(self, plan: StepPlan) -> float:
        """One step: prompts by token and by attended pair, decodes by step and by sequence."""
        total_s = 0.0
        for sequence in plan.sequences:
            count = len(sequence.token_ids)
            pairs = count * (sequence.start + count / 2)
            total_s += self.sequence_s if count == 1 else count * self.token_s + pairs * self.pair_s
        return total_s + self.step_s


@dataclass(slots=True)
class Asked:
    """One request on its way."""

    request: Request
    at_s: float
    hashes: Sequence[bytes]
    reader: "Simulated | None" = None
    writer: "Simulated | None" = None
    num_uncached: int = 0
    began_s: float = 0.0
    ttft_s: float = 0.0
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


class Simulated:
    """One instance: the engine, and what the router counts on it."""

    def __init__(self, world: "World", name: str, role: Role, num_blocks: int) -> None:
        self.world, self.name, self.role = world, name, role
        config = EngineConfig(block_size=BLOCK)
        self.kv = KvManager(num_blocks, BLOCK, MODEL)
        scheduler = Scheduler(config, self.kv, (), num_blocks * BLOCK)
        self.core = EngineCore(scheduler, world, Pace(config), self, lambda: world.now_s)
        self.placed: dict[str, int] = {}
        self.computed_s = 0.0
        self.is_stepping = False
        self.waiting: list[Asked] = []
        layout = KvLayout("bfloat16", 1, 1, 16, BLOCK)
        capacity = num_blocks * BLOCK
        self.instance = Instance(
            name, role, name, name, MODEL, MODEL, layout, capacity, capacity, config.max_gap_s
        )

    # EngineListener

    def wants_layers(self, plan: StepPlan) -> bool:
        return False

    def layer_written(self, plan: StepPlan, layer: int) -> None:
        """Nobody listens."""

    def stepped(self, events: list[EngineEvent], record: StepRecord | None) -> None:
        for event in events:
            self.world.on_event(self, event)

    # Steps

    def kick(self) -> None:
        """Begin a step, unless one runs or there is nothing to do."""
        if self.is_stepping or (plan := self.core.next_plan()) is None:
            return
        self.is_stepping = True
        started_s = self.core.begin(plan)

        def ended() -> None:
            tokens = {e.request_id: 7 for s in plan.sequences if s.samples for e in s.samplers}
            self.is_stepping = False
            self.core.end(plan, StepResult(tokens), started_s)
            self.admit()
            self.kick()

        self.world.later(self.world.times.forward_s(plan), ended)

    def admit(self) -> None:
        """Grant those that wait for blocks here, first come, first served."""
        while self.waiting:
            asked = self.waiting[0]
            reservation = self.core.reserve(asked.request)
            if reservation is None:
                return
            self.waiting.pop(0)
            assert asked.reader is not None
            asked.reader.core.grant(asked.request.request_id)
            asked.reader.kick()

    def view(self) -> InstanceView:
        prompts = [tokens for tokens in self.placed.values() if tokens]
        stats = self.kv.stats()
        load = Load(blocks_total=stats.total, blocks_free=stats.free, blocks_cached=stats.cached)
        pending = Pending(len(self.placed), sum(prompts), len(prompts))
        return InstanceView(self.instance, InstanceState.READY, load, pending)


class World:
    """The clock, the router, and everybody it places on."""

    def __init__(
        self, rules: Rules, times: TimeModel, num_prefill: int, num_decode: int, num_blocks: int
    ) -> None:
        self.now_s, self.rules, self.times = 0.0, rules, times
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._turn = itertools.count(1)
        self.rates, self.index = Rates(), CacheIndex()
        roles = {Role.PREFILL: num_prefill, Role.DECODE: num_decode}
        self.instances = {
            f"{role.value}-{i}": Simulated(self, f"{role.value}-{i}", role, num_blocks)
            for role, count in roles.items()
            for i in range(count)
        }
        self._asked: dict[str, Asked] = {}
        self.done: list[Asked] = []

    def run(self, plan: StepPlan, on_layer: object = None) -> StepResult:
        """Never called: steps are timed, not computed."""
        raise AssertionError

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._numbers), what))

    def replay(self, asks: Sequence[Asked]) -> list[Asked]:
        """All of them, to the end; in the order they ended."""
        for asked in asks:
            self.later(asked.at_s, lambda asked=asked: self._ask(asked))  # type: ignore[misc]
        self.later(0.0, self._heartbeat)
        while len(self.done) < len(asks):
            self.now_s, _, what = heapq.heappop(self._due)
            what()
        return self.done

    def _heartbeat(self) -> None:
        for name, instance in self.instances.items():
            self.index.apply(name, instance.core.cache_news(self.index.next_sequence(name)))
        self.later(HEARTBEAT_INTERVAL_S, self._heartbeat)

    def _ask(self, asked: Asked) -> None:
        cached: dict[str, int] = {}
        if self.rules.policy in BY_PREFIX:
            found = self.index.num_cached_blocks(asked.hashes)
            cached = {name: count * BLOCK for name, count in found.items()}
        request = asked.request
        demand = Demand(len(request.prompt_token_ids), request.sampling.max_tokens, cached)
        snapshot = Snapshot(tuple(each.view() for each in self.instances.values()), True)
        where = place(demand, snapshot, self.rules, self.rates, next(self._turn))
        asked.writer = writer = self.instances[where.decode]
        reader = self.instances[where.prefill] if where.prefill else writer
        asked.reader, asked.began_s = reader, self.now_s
        asked.num_uncached = demand.uncached(reader.view())
        self._asked[request.request_id] = asked
        writer.placed[request.request_id] = 0
        reader.placed[request.request_id] = asked.num_uncached
        if where.prefill:
            reader.core.submit(request, Purpose.SOURCE)
        else:
            reader.core.submit(request, Purpose.LOCAL)
        reader.kick()

    def on_event(self, where: Simulated, event: EngineEvent) -> None:
        asked = self._asked[event.request_id]
        assert asked.reader is not None and asked.writer is not None
        if isinstance(event, Picked) and where is asked.reader and where is not asked.writer:
            asked.writer.waiting.append(asked)
            self.later(0.0, asked.writer.admit)
        elif isinstance(event, Sampled):
            if where is asked.reader and not asked.ttft_s:
                self._first(asked, event)
            else:
                asked.gaps_s.append(self.now_s - asked.last_s)
                asked.last_s = self.now_s
                if event.finish_reason is not None:
                    self._end(asked)

    def _first(self, asked: Asked, event: Sampled) -> None:
        reader, writer = asked.reader, asked.writer
        assert reader is not None and writer is not None
        asked.ttft_s, asked.last_s = self.now_s - asked.at_s, self.now_s
        alone_s = self.now_s - max(asked.began_s, reader.computed_s)
        reader.computed_s = self.now_s
        num_prompt = len(asked.request.prompt_token_ids)
        self.rates.saw_prefill(asked.num_uncached, num_prompt - asked.num_uncached, alone_s)
        reader.placed[asked.request.request_id] = 0
        if reader is writer:
            if event.finish_reason is not None:
                self._end(asked)
            return
        exposed_s = self.times.kv_token_s * BLOCK  # the last block; the rest went meanwhile
        self.rates.saw_handoff(reader.name, writer.name, num_prompt, exposed_s)

        def landed() -> None:
            reader.placed.pop(asked.request.request_id)
            reader.core.finish(asked.request.request_id)
            reader.kick()
            if asked.request.sampling.max_tokens == 1:
                self._end(asked)
                return
            writer.core.join(asked.request.request_id, event.token_id)
            writer.kick()

        self.later(exposed_s, landed)

    def _end(self, asked: Asked) -> None:
        writer = asked.writer
        assert writer is not None
        tpot_s = mean(asked.gaps_s) if asked.gaps_s else 0.0
        self.rates.saw_decode(len(writer.placed), 1 + len(asked.gaps_s), tpot_s)
        writer.placed.pop(asked.request.request_id, None)
        writer.core.finish(asked.request.request_id)
        self.later(0.0, writer.admit)
        self.later(0.0, writer.kick)
        self.done.append(asked)
