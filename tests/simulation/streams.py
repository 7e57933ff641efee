"""The streams of an instance over simulated connections: the router's, and those of KV transfer.

Each is the other half of an interface that production fills with gRPC: ``WorkStream`` between
the router and a service, ``Link`` and ``ControlStream`` between a source and a target. What the
handoff's protocol must bear (frames lost, doubled, late, damaged) happens here.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtransfer.errors import BadFrame, LinkLost
from kvtransfer.target import KvTarget
from protos import kv_transfer_pb2 as pb
from services.router.streams import Command, Events
from services.runtime.errors import Unavailable
from tests.simulation.loop import Process
from tests.simulation.network import Broken, Connection

CONTROL, DATA = 0, 1


class RouterStream:
    """The router's end of one ``Run`` call."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def write(self, command: Command) -> None:
        """Raises Unavailable."""
        try:
            await self._connection.forth[0].put(type(command).FromString(_bytes(command)))
        except Broken as error:
            raise Unavailable(str(error)) from error

    async def events(self) -> AsyncIterator[Events]:
        """Raises Unavailable."""
        try:
            while True:
                yield await self._connection.back[0].get()
        except Broken as error:
            raise Unavailable(str(error)) from error

    async def close(self) -> None:
        self._connection.cut("the router hung up")


class _Call:
    """What a service sees of a call."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def done(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


async def serve_run(service: Any, process: Process, connection: Connection) -> None:
    """The instance's end of one ``Run`` call, as a gRPC server runs it."""
    call, handler = _Call(), asyncio.current_task()

    def ended(_: str) -> None:
        call.done()
        if handler is not None:
            handler.cancel()

    connection.on_broken(process, ended)
    try:
        async for events in service.Run(_commands(connection), call):
            await connection.back[0].put(type(events).FromString(_bytes(events)))
    except Broken:
        return
    finally:
        call.done()
        connection.cut("the instance ended the call")


async def _commands(connection: Connection) -> AsyncIterator[Command]:
    try:
        while True:
            yield await connection.forth[0].get()
    except Broken:
        return


@dataclass(slots=True)
class Mischief:
    """How often KV frames are lost, doubled, overtaken or damaged."""

    rng: random.Random
    rate: float = 0.0
    damage_rate: float = 0.0

    def mangle(self, held: list[Any], message: Any) -> list[Any]:
        """What arrives instead of ``message``."""
        if not self.rate:
            return [message]
        drawn = self.rng.random()
        if drawn < self.rate / 2:
            return []
        if drawn < self.rate:
            held.append(message)  # it comes after its successors
            return []
        arrived = [message, message] if drawn > 1 - self.rate else [message]
        if held and self.rng.random() < 0.3:
            arrived.append(held.pop(0))
        return arrived

    def damage(self, message: bytes) -> bytes:
        if not self.damage_rate or self.rng.random() >= self.damage_rate:
            return message
        at = self.rng.randrange(24, len(message))
        return message[:at] + bytes([message[at] ^ 4]) + message[at + 1 :]


class KvLink:
    """The source's end of a KV connection."""

    is_bare = False
    message_bytes = 1 << 12

    def __init__(self, connection: Connection, mischief: Mischief) -> None:
        self._connection = connection
        self._mischief = mischief
        self._held: tuple[list[Any], list[Any]] = ([], [])

    async def send(self, frame: pb.ControlFrame) -> None:
        frames = [frame]
        if frame.WhichOneof("frame") != "hello":
            frames = self._mischief.mangle(self._held[CONTROL], frame)
        for each in frames:
            await _put(self._connection.forth[CONTROL], _copy(each))

    async def receive(self) -> pb.ControlFrame | None:
        return await _get(self._connection.back[CONTROL])

    async def send_data(
        self, buffers: Sequence[bytes | memoryview], on_read: Callable[[], None]
    ) -> None:
        # As a socket does: the buffers are read while the source goes on with other things.
        await asyncio.sleep(self._connection.network.weather.delay_s())
        message = self._mischief.damage(b"".join(buffers))
        on_read()
        for each in self._mischief.mangle(self._held[DATA], message):
            await _put(self._connection.forth[DATA], each)

    async def close(self) -> None:
        self._connection.cut("the source hung up")


class _TargetEnd:
    """The target's end of its control stream."""

    def __init__(self, connection: Connection, mischief: Mischief) -> None:
        self._way_in, self._way_out = connection.forth[CONTROL], connection.back[CONTROL]
        self._mischief = mischief
        self._held: list[Any] = []

    async def send(self, frame: pb.ControlFrame) -> None:
        frames = [frame]
        if frame.WhichOneof("frame") != "hello":
            frames = self._mischief.mangle(self._held, frame)
        for each in frames:
            await _put(self._way_out, _copy(each))

    async def receive(self) -> pb.ControlFrame | None:
        return await _get(self._way_in)


async def serve_kv(
    target: KvTarget, source_instance_id: str, connection: Connection, mischief: Mischief
) -> None:
    """The target's end of a KV connection, until either stream breaks."""
    control = asyncio.create_task(target.serve_control(_TargetEnd(connection, mischief)))
    try:
        first = await _get(connection.forth[DATA])
        if first is not None:
            await target.serve_data(source_instance_id, _messages(connection, first))
    except (BadFrame, LinkLost):
        pass  # told on the control stream
    finally:
        await control
        connection.cut("the target hung up")


async def _messages(connection: Connection, first: bytes) -> AsyncIterator[bytes]:
    message: bytes | None = first
    while message is not None:
        yield message
        message = await _get(connection.forth[DATA])


async def _put(way: Any, message: Any) -> None:
    try:
        await way.put(message)
    except Broken as error:
        raise LinkLost(str(error)) from error


async def _get(way: Any) -> Any:
    try:
        return await way.get()
    except Broken:
        return None


def _copy(frame: pb.ControlFrame) -> pb.ControlFrame:
    return pb.ControlFrame.FromString(frame.SerializeToString())


def _bytes(message: Any) -> bytes:
    return bytes(message.SerializeToString())
