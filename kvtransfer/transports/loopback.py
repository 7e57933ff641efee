"""The transport inside one process: queues instead of sockets.

For an instance that hands over to itself, and for tests, which put ``Faults`` between the ends.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, TypeVar

from kvtransfer.errors import BadFrame, LinkLost
from kvtransfer.transports.interface import KvEndpoint
from protos import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

T = TypeVar("T")

_QUEUED_MESSAGES = 8
"""Messages under way on a stream before its writer waits."""


class Faults:
    """What happens to messages between the ends; here: nothing. Tests override it."""

    async def control(self, to_target: bool, frame: pb.ControlFrame) -> Sequence[pb.ControlFrame]:
        """What arrives instead of ``frame``: nothing, it, or it twice; may take its time."""
        return (frame,)

    async def data(self, message: bytes) -> Sequence[bytes]:
        """What arrives instead of ``message``."""
        return (message,)


class _Pipe(Generic[T]):
    """One direction of one stream."""

    def __init__(self) -> None:
        self._messages: deque[T] = deque()
        self._is_cut = False
        self._moved = asyncio.Event()

    async def put(self, message: T) -> None:
        while len(self._messages) >= _QUEUED_MESSAGES and not self._is_cut:
            await self._moved.wait()
        if self._is_cut:
            raise LinkLost("the connection was cut")
        self._messages.append(message)
        self._move()

    async def get(self) -> T | None:
        """The next message; None: cut."""
        while not self._messages:
            if self._is_cut:
                return None
            await self._moved.wait()
        message = self._messages.popleft()
        self._move()
        return message

    def cut(self) -> None:
        """What has not been read is lost, as with a socket."""
        self._is_cut = True
        self._messages.clear()
        self._move()

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


class LoopbackLink:
    """Both ends of one pair."""

    is_bare = False
    message_bytes = 1 << 20

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._to_target: _Pipe[pb.ControlFrame] = _Pipe()
        self._to_source: _Pipe[pb.ControlFrame] = _Pipe()
        self._data: _Pipe[bytes] = _Pipe()

    async def send(self, frame: pb.ControlFrame) -> None:
        """Source -> target."""
        for arrived in await self._faults.control(True, frame):
            await self._to_target.put(arrived)

    async def receive(self) -> pb.ControlFrame | None:
        """Target -> source."""
        return await self._to_source.get()

    async def send_data(
        self, buffers: Sequence[bytes | memoryview], on_read: Callable[[], None]
    ) -> None:
        """Source -> target."""
        message = b"".join(buffers)
        on_read()
        for arrived in await self._faults.data(message):
            await self._data.put(arrived)

    async def close(self) -> None:
        """Cut every stream at once."""
        self.cut()

    def cut(self) -> None:
        """Both ends lose the connection."""
        for pipe in (self._to_target, self._to_source, self._data):
            pipe.cut()

    async def serve(self, target: KvEndpoint, source_instance_id: str) -> None:
        """Run the target's end until the link is cut or the target breaks it."""
        control = asyncio.create_task(target.serve_control(_TargetEnd(self)))
        try:
            first = await self._data.get()
            if first is not None:
                await target.serve_data(source_instance_id, self._messages(first))
            await control
        except (BadFrame, LinkLost) as error:
            logger.info("the target broke the data stream: %s", error)
            await control
        finally:
            control.cancel()
            self.cut()

    async def _messages(self, first: bytes) -> AsyncIterator[bytes]:
        message: bytes | None = first
        while message is not None:
            yield message
            message = await self._data.get()

    async def send_to_source(self, frame: pb.ControlFrame) -> None:
        for arrived in await self._faults.control(False, frame):
            await self._to_source.put(arrived)

    async def receive_at_target(self) -> pb.ControlFrame | None:
        return await self._to_target.get()


class _TargetEnd:
    """The target's end of a link's control stream."""

    def __init__(self, link: LoopbackLink) -> None:
        self.send = link.send_to_source
        self.receive = link.receive_at_target


class LoopbackNetwork:
    """Connects sources and targets of one process by address."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.targets: dict[str, KvEndpoint] = {}
        self.links: list[LoopbackLink] = []
        self._faults = faults or Faults()
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(
        self, address: str, source_instance_id: str, target_instance_id: str
    ) -> LoopbackLink:
        """Dial the target at ``address``."""
        target = self.targets.get(address)
        if target is None:
            raise LinkLost(f"nobody listens at {address}")
        link = LoopbackLink(self._faults)
        self.links.append(link)
        task = asyncio.create_task(link.serve(target, source_instance_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return link

    async def aclose(self) -> None:
        """Cut every link and wait until both ends have noticed."""
        for link in self.links:
            link.cut()
        await asyncio.gather(*self._tasks)
