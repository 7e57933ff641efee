"""One router's stream to one service of an instance: many requests, one message a turn.

    1  the router opens the stream; every command names a request
    2  each started request runs as a task of its own and emits events
    3  events that fall due together leave as one message
    4  the stream breaks: every task on it is cancelled and cleans up after itself

Knows nothing of what the requests do. Used by the prefill and the decode service.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)

Command = TypeVar("Command")
Event = TypeVar("Event")


class Session(Generic[Event]):
    """The requests of one stream."""

    def __init__(self) -> None:
        self._outbox: list[Event] = []
        self._due = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    def emit(self, event: Event) -> None:
        """Queue an event for the router; events of a broken stream are dropped."""
        if not self._closed:
            self._outbox.append(event)
            self._due.set()

    def start(self, request_id: str, work: Coroutine[Any, Any, None]) -> bool:
        """Run ``work`` as this request's task. False if the id is already running here."""
        if self._closed or request_id in self._tasks:
            work.close()
            return False
        task = asyncio.create_task(work, name=f"request-{request_id}")
        self._tasks[request_id] = task
        task.add_done_callback(lambda done: self._ended(request_id, done))
        return True

    def abort(self, request_id: str) -> None:
        """Cancel a request's task. Unknown ids are ignored: it may just have ended."""
        if task := self._tasks.get(request_id):
            task.cancel()

    def end_all(self, last_event: Callable[[str], Event]) -> None:
        """End every request with an event, made for its id."""
        for request_id, task in list(self._tasks.items()):
            self.emit(last_event(request_id))
            task.cancel()

    def close(self) -> None:
        """The stream is gone: cancel what runs on it. Idempotent."""
        self._closed = True
        self._due.set()
        for task in list(self._tasks.values()):
            task.cancel()

    async def run(
        self,
        commands: AsyncIterator[Command],
        handle: Callable[[Command], None],
    ) -> AsyncIterator[list[Event]]:
        """Serve the stream until the router ends it; yields the events of each turn."""
        reader = asyncio.create_task(self._read(commands, handle), name="session-reader")
        try:
            while not self._closed and not (reader.done() and not self._tasks and not self._outbox):
                await self._due.wait()
                self._due.clear()
                batch, self._outbox = self._outbox, []
                if batch:
                    yield batch
        finally:
            reader.cancel()
            self.close()

    async def _read(
        self,
        commands: AsyncIterator[Command],
        handle: Callable[[Command], None],
    ) -> None:
        try:
            async for command in commands:
                handle(command)
        finally:
            self._due.set()

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(request_id, None)
        self._due.set()
        if not task.cancelled() and (error := task.exception()):
            log.error("request %s: unexpected %r", request_id, error, exc_info=error)
