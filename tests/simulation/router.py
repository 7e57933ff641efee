"""The router of a simulated cluster: the real fleet, placement, attempts and serving."""

import functools
import random
from collections.abc import Callable
from typing import Any, cast

from services.router.admission import Admission
from services.router.disaggregation import Rules
from services.router.fleet import Fleet
from services.router.intake import Intake
from services.router.membership import Instance
from services.router.serving import Serving
from services.router.streams import WorkStream
from services.router.traces import Traces
from services.runtime.errors import ServiceError, Unavailable
from services.runtime.metrics import RouterMetrics, new_registry
from tests.simulation.instance import MODEL, ROUTER_ADDRESS
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import Broken, Connection, Network
from tests.simulation.streams import RouterStream


@functools.cache
def _metrics() -> RouterMetrics:
    return RouterMetrics.create(new_registry(), MODEL, "router")


class SimulatedRouter:
    """One process that places requests and follows them."""

    def __init__(
        self, loop: VirtualLoop, network: Network, rng: random.Random, life: int, rules: Rules
    ) -> None:
        self.process = Process(loop, f"router.{life}")
        self._network = network
        self.fleet = Fleet(MODEL, self._dial, lambda snapshot: None, loop.time)
        self.serving = Serving(
            self.fleet,
            Admission(1000),
            cast(Intake, None),  # requests come typed
            _metrics(),
            max_context=1 << 16,
            rules=rules,
            traces=Traces(MODEL, 0),
            clock=loop.time,
            new_handoff_id=lambda: rng.randbytes(16),
        )

    def start(self) -> None:
        self._network.listen(ROUTER_ADDRESS, self.process, self._serve)
        self.process.spawn(self.fleet.start())

    async def _dial(self, instance: Instance) -> WorkStream:
        try:
            connection = await self._network.dial(self.process, instance.address, "run")
        except Broken as error:
            raise Unavailable(str(error)) from error
        return RouterStream(connection)

    async def _serve(self, connection: Connection, question: Any) -> None:
        """What an instance asks, as ``cluster_service`` answers it."""
        verb, *asked = question
        answers: dict[str, Callable[..., Any]] = {
            "heartbeat": self._heartbeat,
            "register": self._register,
        }
        try:
            connection.back[0].post(answers[verb](*asked))
        except Broken:
            return

    def _heartbeat(self, instance_id: str, *said: Any) -> tuple[bool, int]:
        known = self.fleet.heartbeat(instance_id, *said)
        return known, self.fleet.cache.next_sequence(instance_id)

    def _register(self, *asked: Any) -> tuple[bool, int] | ServiceError:
        try:
            self.fleet.register(*asked)
        except ServiceError as error:
            return error
        return True, 0
