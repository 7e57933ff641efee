"""Work that must run to its end although whoever asked for it has gone, and waits that must not.

Used by the prefill and the decode service: blocks are released by ``Background``, so that
neither a cancelled request nor a broken stream can skip it; ``unless`` lets a wait end with the
handoff it belongs to.
"""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


async def unless(wanted: Awaitable[T], ending: "asyncio.Future[Any]") -> T:
    """The result of ``wanted``, or at once the exception of ``ending`` if that fails first."""
    task = asyncio.ensure_future(wanted)
    try:
        await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            ending.result()
        return await task
    finally:
        task.cancel()


class Background:
    """Tasks that nobody else holds."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``; a failure is logged, because there is nobody left to tell."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def settle(self) -> None:
        """Until all of it has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("background work failed: %r", error, exc_info=error)
