"""What source and target shells share: talking over a control stream, and watching a handoff.

Knows streams and records, decides nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from kvtransfer.errors import (
    BadFrame,
    HandoffCancelled,
    HandoffError,
    HandoffFailed,
    HandoffRefused,
    LinkLost,
)
from kvtransfer.handoff.frames import Frame, Refuse
from kvtransfer.handoff.ledger import Record
from kvtransfer.handoff.table import HandoffState
from kvtransfer.handshake import check_not_refused
from kvtransfer.transports.interface import ControlStream
from kvtransfer.wire import frame_from_proto, frame_to_proto

logger = logging.getLogger(__name__)

LAST_WORD_S = 1.0
"""When a connection ends, how long what is queued may take to be written."""


R = TypeVar("R", bound=Record)


class Watched(Generic[R]):
    """The latest record of one handoff, and whoever waits for it to move."""

    def __init__(self, record: R) -> None:
        self.record = record
        self._moved = asyncio.Event()

    def update(self, record: R) -> None:
        """The machine moved it."""
        self.record = record
        self._moved.set()
        self._moved = asyncio.Event()

    async def until(self, is_done: Callable[[R], bool]) -> R:
        """The record once ``is_done``.

        Raises:
            HandoffRefused, HandoffCancelled, HandoffFailed: it stopped before; the reason.
        """
        while True:
            self.check()
            if is_done(self.record):
                return self.record
            await self._moved.wait()

    def check(self) -> None:
        """Raises as ``until`` does when the handoff stopped."""
        if self.record.stopped:
            raise _error(self.record)

    async def drained(self) -> None:
        """Returns when the handoff is over and nothing of it is in flight here."""
        while not self.record.drained:
            await self._moved.wait()


def _error(record: Record) -> HandoffError:
    if record.refused:
        return HandoffRefused(record.reason)
    if record.state is HandoffState.FAILED:
        return HandoffFailed(record.reason)
    return HandoffCancelled(record.reason)


class Outbox:
    """Control frames on their way out of one connection, in order."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()

    def post(self, frame: Frame) -> None:
        """Queue a frame; never waits."""
        self._frames.put_nowait(frame)

    async def run(self, stream: ControlStream) -> None:
        """Write frames until cancelled. Raises LinkLost."""
        while True:
            frame = await self._frames.get()
            await stream.send(frame_to_proto(frame))
            self._frames.task_done()

    async def written(self) -> None:
        """Returns when everything queued is written."""
        await self._frames.join()


async def converse(
    stream: ControlStream,
    outbox: Outbox,
    on_frame: Callable[[Frame], None],
    broken: "asyncio.Future[str]",
    on_end: Callable[[str], None],
) -> None:
    """Run a control stream both ways until it ends; ``on_end`` learns why, at once.

    ``broken`` ends it from the side: the data stream beside it broke, or we shut down. The peer
    is told why, after all that was said before, should it still listen.
    """
    listener = asyncio.create_task(_listen(stream, on_frame))
    writer = asyncio.create_task(outbox.run(stream))
    try:
        ends: list[asyncio.Future[Any]] = [listener, writer, broken]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        reason = broken.result() if broken.done() else _reason(listener, writer)
        on_end(reason)
        outbox.post(Refuse(b"", reason))
        written = asyncio.create_task(outbox.written())
        await asyncio.wait(
            [writer, written], timeout=LAST_WORD_S, return_when=asyncio.FIRST_COMPLETED
        )
        written.cancel()
    finally:
        listener.cancel()
        writer.cancel()
        await asyncio.gather(listener, writer, return_exceptions=True)


def _reason(*ended: "asyncio.Task[None]") -> str:
    """Why the first of these tasks ended. Raises what is no lost link and no bad frame: a bug."""
    for task in ended:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, LinkLost | BadFrame):
                return str(error)
            raise error
    return "the peer ended the connection"


async def _listen(stream: ControlStream, on_frame: Callable[[Frame], None]) -> None:
    while (message := await stream.receive()) is not None:
        check_not_refused(message)
        on_frame(frame_from_proto(message))


class TaskSet:
    """Background tasks that are kept, and whose crashes are logged, never lost."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` beside everything else."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def cancel(self) -> None:
        """Cancel all and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a KV transfer task crashed", exc_info=error)
