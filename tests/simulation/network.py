"""Connections between processes: in order and reliable until they break, like TCP.

A message takes the latency that the run's ``Weather`` draws for it, and never overtakes another
of its direction; both ends hear of a break, each in its time. Between two processes the line may
be held: nothing arrives until it is let go. Knows nothing of what travels.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.loop import Process, VirtualLoop

_IN_FLIGHT = 64
"""Messages of one direction under way or unread before the writer waits."""


class Broken(Exception):
    """The connection is no more."""


@dataclass(slots=True)
class Weather:
    """How long messages take."""

    rng: random.Random
    latency_s: float = 0.0002
    jitter_s: float = 0.0003
    storm_rate: float = 0.0
    """Share of messages that take up to ``storm_s`` more."""
    storm_s: float = 0.5

    def delay_s(self) -> float:
        delay = self.latency_s + self.jitter_s * self.rng.random()
        if self.storm_rate and self.rng.random() < self.storm_rate:
            delay += self.storm_s * self.rng.random()
        return delay


class _Way:
    """One direction of one stream of a connection."""

    def __init__(self, connection: "Connection", sender: Process, receiver: Process) -> None:
        self._connection = connection
        self._sender = sender
        self._receiver = receiver
        self._flying: deque[Any] = deque()
        self._arrived: deque[Any] = deque()
        self._last_s = 0.0
        self._num_under_way = 0
        self._moved: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    async def put(self, message: object) -> None:
        """Raises Broken."""
        while self._num_under_way >= _IN_FLIGHT and not self._connection.is_broken:
            self._room = asyncio.get_running_loop().create_future()
            await self._room
        self.post(message)

    def post(self, message: object) -> None:
        """Without waiting for room. Raises Broken."""
        if self._connection.is_broken:
            raise Broken(self._connection.reason)
        self._num_under_way += 1
        self._flying.append(message)
        network = self._connection.network
        self._last_s = max(self._last_s, network.arrival_s(self._sender, self._receiver))
        network.loop.call_at(self._last_s, self._arrive, context=network.nobody)

    async def get(self) -> Any:
        """The next message. Raises Broken."""
        while not self._arrived:
            if self._connection.is_broken:
                raise Broken(self._connection.reason)
            self._moved = asyncio.get_running_loop().create_future()
            await self._moved
        message = self._arrived.popleft()
        self._num_under_way -= 1
        _wake(self._room)
        return message

    def broke(self) -> None:
        """What has not been read is lost."""
        self._flying.clear()
        self._arrived.clear()
        _wake(self._moved)
        _wake(self._room)

    def _arrive(self) -> None:
        """The oldest message under way is due: which timer says so does not matter."""
        network = self._connection.network
        held_s = network.held_until_s(self._sender, self._receiver)
        if held_s > network.loop.time():
            self._last_s = max(self._last_s, held_s)
            network.loop.call_at(held_s, self._arrive, context=network.nobody)
        elif not self._connection.is_broken:
            message = self._flying.popleft()
            self._arrived.append(message)
            _wake(self._moved)
            network.happened(f"{self._sender.name} > {self._receiver.name}: {_brief(message)}")


def _wake(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _brief(message: object) -> str:
    if isinstance(message, (bytes, bytearray)):
        return f"{len(message)} bytes"
    return " ".join(str(message).split())[:100]


@dataclass(slots=True)
class _End:
    process: Process
    on_broken: Callable[[str], None]


class Connection:
    """Two processes and ``num_streams`` streams between them."""

    def __init__(
        self, network: "Network", dialler: Process, listener: Process, num_streams: int
    ) -> None:
        self.network = network
        self.ends = (dialler, listener)
        self.forth = [_Way(self, dialler, listener) for _ in range(num_streams)]
        self.back = [_Way(self, listener, dialler) for _ in range(num_streams)]
        self.is_broken = False
        self.reason = ""
        self._listeners: list[_End] = []

    def on_broken(self, process: Process, callback: Callable[[str], None]) -> None:
        """``callback`` will run in ``process`` when the connection breaks."""
        self._listeners.append(_End(process, callback))

    def cut(self, reason: str) -> None:
        """Break it, for both ends. Idempotent."""
        if self.is_broken:
            return
        self.is_broken, self.reason = True, reason
        self.network.forget(self)
        for way in (*self.forth, *self.back):
            way.broke()
        for end in self._listeners:
            end.process.call(end.on_broken, reason)


@dataclass(eq=False)
class Network:
    """All connections of one run."""

    loop: VirtualLoop
    weather: Weather
    happened: Callable[[str], None]
    connections: list[Connection] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nobody = Process(self.loop, "network").context
        self._held: dict[frozenset[str], float] = {}
        self._served: dict[str, tuple[Process, Callable[[Connection, Any], Any]]] = {}

    def listen(
        self,
        address: str,
        process: Process,
        serve: Callable[[Connection, Any], Coroutine[Any, Any, None]],
    ) -> None:
        """Whoever dials ``address`` is served in ``process``."""
        self._served[address] = (process, serve)

    async def dial(
        self, dialler: Process, address: str, greeting: object, num_streams: int = 1
    ) -> Connection:
        """Raises Broken: nobody listens there."""
        await asyncio.sleep(self.weather.delay_s())
        process, serve = self._served.get(address, (None, None))
        if process is None or serve is None or process.is_dead:
            raise Broken(f"nobody listens at {address}")
        held_s = self.held_until_s(dialler, process) - self.loop.time()
        if held_s > 0:
            await asyncio.sleep(held_s)
        if process.is_dead:
            raise Broken(f"nobody listens at {address}")
        connection = Connection(self, dialler, process, num_streams)
        self.connections.append(connection)
        process.spawn(serve(connection, greeting))
        return connection

    async def ask(self, asker: Process, address: str, question: object) -> Any:
        """What whoever listens at ``address`` answers. Raises Broken, or what it answered."""
        connection = await self.dial(asker, address, question)
        try:
            answer = await connection.back[0].get()
        finally:
            connection.cut("asked and answered")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def arrival_s(self, sender: Process, receiver: Process) -> float:
        now_s = self.loop.time()
        return max(now_s, self.held_until_s(sender, receiver)) + self.weather.delay_s()

    def hold(self, one: Process, other: Process, until_s: float) -> None:
        """Nothing passes between two processes until then."""
        self._held[frozenset((one.name, other.name))] = until_s

    def held_until_s(self, one: Process, other: Process) -> float:
        return self._held.get(frozenset((one.name, other.name)), 0.0)

    def vanish(self, process: Process) -> None:
        """Its connections break, as a kernel does for a process that is killed."""
        for connection in [each for each in self.connections if process in each.ends]:
            connection.cut(f"{process.name} was killed")

    def forget(self, connection: Connection) -> None:
        self.connections.remove(connection)
