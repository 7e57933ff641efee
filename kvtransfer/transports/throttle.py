"""A slower network than there is: bandwidth and latency around any transport, for experiments.

    connect = throttled(connect, Throttle(bytes_per_s=200e6, latency_s=0.002))

Only what the source says is slowed: data messages share one line of ``bytes_per_s``, whatever
pair they belong to, and everything arrives ``latency_s`` later. Messages stay in order and
overlap: latency costs no bandwidth. Knows neither frames nor handoffs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvtransfer.errors import LinkLost
from kvtransfer.transports.interface import Connect, Link
from protos import kv_transfer_pb2 as pb

_BURST_S = 0.005
"""An idle line may catch up by this much: timers and copies are late, a wire is not."""
_QUEUED_MESSAGES = 64
"""On their way, late by the latency; a writer waits for room beyond."""


@dataclass(frozen=True, slots=True)
class Throttle:
    """How slow the line is."""

    bytes_per_s: float = 0.0
    """0: as fast as it goes."""
    latency_s: float = 0.0


class _Line:
    """The one line of a process: when it is free again."""

    def __init__(self, throttle: Throttle) -> None:
        self.throttle = throttle
        self._free_s = 0.0

    async def occupy(self, num_bytes: int) -> None:
        """Returns when ``num_bytes`` more have gone through."""
        if not self.throttle.bytes_per_s:
            return
        loop = asyncio.get_running_loop()
        self._free_s = max(self._free_s, loop.time() - _BURST_S)
        self._free_s += num_bytes / self.throttle.bytes_per_s
        await asyncio.sleep(self._free_s - loop.time())


def throttled(connect: Connect, throttle: Throttle) -> Connect:
    """``connect``, over one line of this speed; itself where there is nothing to slow."""
    if throttle == Throttle():
        return connect
    line = _Line(throttle)

    async def dial(address: str, source_instance_id: str, target_instance_id: str) -> Link:
        return _SlowLink(await connect(address, source_instance_id, target_instance_id), line)

    return dial


class _SlowLink:
    """A link whose words and bytes leave late."""

    def __init__(self, link: Link, line: _Line) -> None:
        self._link = link
        self._line = line
        self._control = _Delay(line.throttle.latency_s)
        self._data = _Delay(line.throttle.latency_s)
        self.receive = link.receive

    @property
    def is_bare(self) -> bool:
        return self._link.is_bare

    @property
    def message_bytes(self) -> int:
        return self._link.message_bytes

    async def send(self, frame: pb.ControlFrame) -> None:
        await self._control.later(lambda: self._link.send(frame))

    async def send_data(
        self, buffers: Sequence[bytes | memoryview], on_read: Callable[[], None]
    ) -> None:
        message = b"".join(buffers)
        on_read()
        await self._line.occupy(len(message))
        await self._data.later(lambda: self._link.send_data([message], lambda: None))

    async def close(self) -> None:
        await self._control.close()
        await self._data.close()
        await self._link.close()


class _Delay:
    """Sends in order, each a while after it was asked for."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._waiting: asyncio.Queue[tuple[float, Callable[[], Awaitable[None]]]] = asyncio.Queue(
            _QUEUED_MESSAGES
        )
        self._task: asyncio.Task[None] | None = None

    async def later(self, send: Callable[[], Awaitable[None]]) -> None:
        """Raises LinkLost, also for what was sent before."""
        if not self._latency_s:
            await send()
            return
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        due_s = asyncio.get_running_loop().time() + self._latency_s
        put = asyncio.create_task(self._waiting.put((due_s, send)))
        await asyncio.wait([put, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            put.cancel()
            error = None if self._task.cancelled() else self._task.exception()
            raise error or LinkLost("the connection was closed")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s, send = await self._waiting.get()
            await asyncio.sleep(due_s - loop.time())
            await send()
