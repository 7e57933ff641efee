"""One run: a cluster in virtual time, clients, faults, and a look at everything after each event.

    1  build     router and instances of the scenario, each a process
    2  run       clients ask; after each event the strikes that are due are carried out
    3  look      whenever an instance has run: its blocks add up, what it has published is right
    4  calm      faults end, clients are told; then nothing may be left of any request
    5  bury      the dead are let end, so that nothing of this run reaches the next

Raises ``Wrong`` with the log of events where a promise is broken. Called by ``runs``.
"""

import asyncio
import random
from collections.abc import Callable, Iterable

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.request import Request
from services.router.disaggregation import Rules
from services.runtime.settings import Role
from tests.simulation.client import Client
from tests.simulation.engine import StepTimes
from tests.simulation.instance import BLOCK_SIZE, NUM_LAYERS, SimulatedInstance, Surroundings
from tests.simulation.loop import Process, ProcessState, VirtualLoop
from tests.simulation.network import Network, Weather
from tests.simulation.router import SimulatedRouter
from tests.simulation.scenario import Fault, Scenario, Strike
from tests.simulation.streams import Mischief
from tests.simulation.truth import Truth, Wrong

START_S = 1.0
"""By then the instances have registered."""
PATIENCE_S = 60.0
"""No request takes longer, whatever goes wrong; those that heal take at most half of it."""
LEAVE_S = 1.0
"""A request that has ended is gone everywhere by then."""
CALM_S = 15.0
"""After all is told, longer than every lease and timeout of a handoff."""


class Cluster:
    """A router and its instances, and the log of what happened."""

    def __init__(self, scenario: Scenario, loop: VirtualLoop) -> None:
        self.log: list[str] = []
        self._scenario = scenario
        self._loop = loop
        self._num_events = 0
        self._strikes = sorted(scenario.strikes, key=lambda strike: strike.after_events)
        self._rng = random.Random(f"{scenario.seed}/weather")
        rates = scenario.rates
        self._network = Network(loop, Weather(self._rng, storm_rate=rates.storm), self._happened)
        times = StepTimes(self._rng, failure_rate=rates.step_failure, hiccup_rate=rates.hiccup)
        config = EngineConfig(
            block_size=BLOCK_SIZE, max_decode_sequences=scenario.max_decode_sequences
        )
        mischief = Mischief(self._rng, rates.mischief, rates.damage)
        self._world = Surroundings(
            loop, self._network, times, mischief, config, scenario.num_blocks
        )
        self._troubled_until_s = 0.0
        self._lives = 0
        self._grave: list[Process] = []
        self._wrong: Exception | None = None
        self.router = self._begin_router()
        roles = {Role.PREFILL: scenario.num_prefill, Role.DECODE: scenario.num_decode}
        names = [(f"{role.value}-{i}", role) for role, n in roles.items() for i in range(n)]
        self._instances = {name: self._begin(name, role) for name, role in names}
        some = next(iter(self._instances.values()))
        truth = Truth(some.runner.model_digest, NUM_LAYERS)
        self._truth = truth
        self._clients = [
            Client(
                ask,
                truth.add(ask.request),
                _fits(ask.request, scenario),
            )
            for ask in scenario.asks
        ]
        self._asking: dict[int, asyncio.Task[None]] = {}

    # ---- the run ----------------------------------------------------------------------------

    async def run(self) -> None:
        """
        Raises:
            Wrong: a promise was broken.
        """
        for index, client in enumerate(self._clients):
            self._loop.call_at(START_S + client.ask.at_s, self._ask, index)
        last_s = START_S + max(client.ask.at_s for client in self._clients)
        await self._until(last_s + PATIENCE_S, self._all_told)
        self._strikes.clear()
        calm_s = max(self._loop.time(), self._troubled_until_s) + CALM_S
        await self._until(calm_s, self._all_calm)
        for client in self._clients:
            client.check(self._scenario.is_calm or self._scenario.must_heal)
        if left := self._left():
            raise Wrong(f"long after everybody was told, {left}")

    async def _until(self, until_s: float, is_done: Callable[[], bool]) -> None:
        while not is_done() and self._loop.time() < until_s:
            await asyncio.sleep(0.1)
            if self._wrong is not None:
                raise self._wrong

    def _all_told(self) -> bool:
        return len(self._asking) == len(self._clients) and all(
            task.done() for task in self._asking.values()
        )

    def _all_calm(self) -> bool:
        return self._loop.time() > self._troubled_until_s and not self._left()

    def _ask(self, index: int) -> None:
        client = self._clients[index]
        self._note(f"client {client.ask.request.request_id} asks")
        if self.router.process.is_dead:
            client.router_died = True
        task = self.router.process.spawn(client.run(self.router.serving))
        self._asking[index] = task
        task.add_done_callback(lambda done: self._told(index, done))

    def _told(self, index: int, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        if self._scenario.rates.are_zero:
            self._later(self._loop.time() + LEAVE_S, self._check_has_left, index)

    # ---- events and faults ------------------------------------------------------------------

    def _happened(self, what: str) -> None:
        self._num_events += 1
        self._note(what)
        for index, task in self._asking.items():
            if self._clients[index].ask.gone_after_events == self._num_events:
                self._note(f"client {self._clients[index].ask.request.request_id} hangs up")
                task.cancel()
        while self._strikes and self._strikes[0].after_events <= self._num_events - self._warmup:
            self._carry_out(self._strikes.pop(0))

    @property
    def _warmup(self) -> int:
        """Events until the first client asks are registrations: nothing strikes there."""
        return self._num_events if not self._asking else self._first_event()

    def _first_event(self) -> int:
        if self._first is None:
            self._first = self._num_events
        return self._first

    _first: int | None = None

    def _carry_out(self, strike: Strike) -> None:
        names = list(self._instances)
        name = names[strike.victim % len(names)]
        process = self._instances[name].process
        again_s = self._loop.time() + strike.lasts_s
        self._troubled_until_s = max(self._troubled_until_s, again_s)
        self._note(f"{strike.fault.value}: {name}, {strike.lasts_s:.3f} s")
        match strike.fault:
            case Fault.KILL if not process.is_dead:
                self._kill(process)
                self._later(again_s, self._again, name)
            case Fault.NODE:
                number = name.partition("-")[2]
                for each in (f"prefill-{number}", f"decode-{number}"):
                    here = self._instances.get(each)
                    if here is not None and not here.process.is_dead:
                        self._kill(here.process)
                        self._later(again_s, self._again, each)
            case Fault.STOP if process.state is ProcessState.RUNNING:
                process.stop()
                self._later(again_s, process.resume)
            case Fault.CUT:
                theirs = [each for each in self._network.connections if process in each.ends]
                if theirs:
                    theirs[strike.victim % len(theirs)].cut("the line was cut")
            case Fault.HOLD:
                others = [self.router.process, *(i.process for i in self._instances.values())]
                others.remove(process)
                other = others[strike.victim % len(others)]
                self._network.hold(process, other, again_s)
            case Fault.ROUTER if not self.router.process.is_dead:
                self._kill(self.router.process)
                for index, task in self._asking.items():
                    if not task.done():
                        self._clients[index].router_died = True
                        self._later(self._loop.time(), self._bury_client, index)
                self._later(again_s, self._router_again)

    def _bury_client(self, index: int) -> None:
        """Its connection broke: it has been told, by its own kernel."""
        told = self._loop.create_future()
        told.set_result(None)
        self._asking[index] = told  # type: ignore[assignment]

    def _kill(self, process: Process) -> None:
        process.kill()
        self._grave.append(process)
        noticed_s = self._loop.time() + self._rng.random() * 0.002
        self._later(noticed_s, self._network.vanish, process)

    def _later(self, at_s: float, what: Callable[..., object], *args: object) -> None:
        """Whoever causes it, it is nobody's: a process that is stopped cannot hold it up."""
        self._loop.call_at(at_s, what, *args, context=self._network.nobody)

    def _again(self, name: str) -> None:
        self._instances[name] = self._begin(name, self._instances[name].role)

    def _router_again(self) -> None:
        self.router = self._begin_router()

    def _begin(self, name: str, role: Role) -> SimulatedInstance:
        self._lives += 1
        instance = SimulatedInstance(self._world, name, role, self._lives)
        instance.process.on_ran = lambda: self._look(instance)
        instance.start()
        return instance

    def _begin_router(self) -> SimulatedRouter:
        self._lives += 1
        router = SimulatedRouter(
            self._loop, self._network, self._rng, self._lives, Rules(policy=self._scenario.policy)
        )
        router.start()
        return router

    # ---- looking ----------------------------------------------------------------------------

    def _look(self, instance: SimulatedInstance) -> None:
        """Some code of it has run: is everything as it must be?"""
        if not instance.has_changed():
            return
        try:
            instance.engine.check_integrity()
            self._truth.check_published(
                instance.process, instance.runner.cache, instance.new_publications()
            )
        except (EngineError, AssertionError) as error:
            self._fail(error)

    def _check_has_left(self, index: int) -> None:
        """A request that has ended holds no block, unless something was wrong meanwhile."""
        if self._loop.time() < self._troubled_until_s + LEAVE_S:
            return
        prefix = f"{self._clients[index].ask.request.request_id}/"
        for instance in self._instances.values():
            if any(each.startswith(prefix) for each in instance.engine.kv.sequence_ids):
                self._fail(Wrong(f"{instance.instance_id} still holds blocks of {prefix}"))

    def _left(self) -> str:
        """What is not as it was before the first request; empty: everything is."""
        for instance in self._instances.values():
            if left := _left(instance):
                return f"{instance.instance_id} still has {left}"
        views = self.router.fleet.snapshot().instances
        if pending := [v.instance.instance_id for v in views if v.pending.num_requests]:
            return f"the router still has requests on {pending}"
        if (ready := sum(view.is_ready for view in views)) != len(self._instances):
            return f"{ready} of {len(self._instances)} instances are ready"
        return ""

    def _fail(self, error: BaseException) -> None:
        if self._wrong is None:
            self._note(f"wrong: {error!r}")
            self._wrong = error if isinstance(error, Exception) else Wrong(repr(error))

    def _note(self, what: str) -> None:
        self.log.append(f"{self._num_events:6d} {self._loop.time():10.6f}  {what}")

    # ---- the end ----------------------------------------------------------------------------

    def processes(self) -> Iterable[Process]:
        """All that ever lived."""
        living = [self.router.process, *(each.process for each in self._instances.values())]
        return dict.fromkeys((*living, *self._grave))


def _fits(request: Request, scenario: Scenario) -> bool:
    """Whether any instance could ever hold it."""
    sampling = request.sampling
    num_prompt_tokens = len(request.prompt_token_ids)
    num_tokens = num_prompt_tokens + sampling.max_tokens
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    if sampling.beam_search is not None:
        num_shared = num_prompt_tokens // BLOCK_SIZE
        num_blocks = num_shared + sampling.num_candidates * (num_blocks - num_shared)
    return (
        num_blocks <= scenario.num_blocks
        and sampling.num_candidates <= scenario.max_decode_sequences
    )


def _left(instance: SimulatedInstance) -> str:
    """What an instance still has of any request; empty: nothing."""
    load = instance.engine.load()
    left = {
        "held blocks": load.blocks.held,
        "quarantined blocks": load.blocks.quarantined,
        "requests running": load.requests_running,
        "requests waiting": load.requests_waiting,
        "handoffs": instance.num_handoffs,
        "subscribers": instance.port.num_subscribers,
    }
    return ", ".join(f"{count} {what}" for what, count in left.items() if count)
