"""Starting, draining and stopping the parts of a process.

    1  start   in order; if one fails, those before it are stopped and the failure is raised
    2  watch   until a stop is asked for, or a part ends by itself
    3  drain   finish what is running, take no more; bounded, and cut short by a second signal
    4  stop    in reverse order, each one although another failed; the first failure is raised

Signals only set an event. Knows nothing of what the parts do. Called by the command line, by
the launcher and by tests.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from types import TracebackType

log = logging.getLogger(__name__)


class Component:
    """A part of a process: it starts, may fail on its own, drains and stops.

    The verbs do nothing by default. ``stop`` is safe to call twice and after a failed start.
    """

    async def start(self) -> None:
        """Return when it serves."""

    async def watch(self) -> None:
        """Wait; raise when the part can no longer do its work."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Take no new work; return when what is running has ended."""

    async def stop(self) -> None:
        """Release everything."""


class Stack(Component):
    """Components as one: started in order, stopped in reverse."""

    def __init__(self, *components: Component) -> None:
        self._components = components
        self._started: list[Component] = []
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        try:
            for component in self._components:
                self._started.append(component)
                await component.start()
        except BaseException:
            await self._stop_after_failure()
            raise

    async def watch(self) -> None:
        watchers = [asyncio.create_task(each.watch()) for each in self._started]
        try:
            await asyncio.gather(*watchers)
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def drain(self) -> None:
        for component in self._started:
            await component.drain()

    async def stop(self) -> None:
        """Whoever calls second waits for the same end; a cancelled caller does not undo it."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop_all())
        await asyncio.shield(self._stopping)

    async def _stop_all(self) -> None:
        first: Exception | None = None
        while self._started:
            component = self._started.pop()
            try:
                await component.stop()
            except Exception as error:
                log.error("%s did not stop cleanly", type(component).__name__, exc_info=error)
                first = first or error
        if first is not None:
            raise first

    async def _stop_after_failure(self) -> None:
        try:
            await self.stop()
        except Exception:
            log.warning("a part failed to stop after another had failed to start")


class StopSignals:
    """SIGINT and SIGTERM as events: the first asks to drain and stop, the second to hurry.

    Only in the main thread; a context manager that puts the old handlers back.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()

    def __enter__(self) -> "StopSignals":
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._received)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def _received(self) -> None:
        if self.stop.is_set():
            self.hurry.set()
        self.stop.set()


async def run_until_stopped(
    root: Component,
    stop: asyncio.Event,
    *,
    on_ready: Callable[[], Awaitable[None]] | None = None,
    hurry: asyncio.Event | None = None,
    drain_timeout_s: float = 30.0,
) -> None:
    """Start ``root``, serve until ``stop`` is set or it fails, drain, stop.

    Raises:
        Exception: the first failure: of the start, of the running part, or of the stop.
    """
    failure: BaseException | None = None
    try:
        await _serve(root, stop, on_ready, hurry, drain_timeout_s)
    except BaseException as error:
        failure = error
    try:
        await root.stop()
    except Exception:
        if failure is None:
            raise
    if failure is not None:
        raise failure


async def _serve(
    root: Component,
    stop: asyncio.Event,
    on_ready: Callable[[], Awaitable[None]] | None,
    hurry: asyncio.Event | None,
    drain_timeout_s: float,
) -> None:
    """Everything but the stop."""
    starting = asyncio.create_task(root.start())
    stopped = asyncio.create_task(stop.wait())
    tasks = [starting, stopped]
    try:
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return  # asked to stop while starting
        starting.result()
        if on_ready is not None:
            await on_ready()
        watching = asyncio.create_task(root.watch())
        tasks.append(watching)
        await asyncio.wait({watching, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        else:
            await _bounded(root.drain(), drain_timeout_s, hurry)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _bounded(work: Awaitable[None], timeout_s: float, hurry: asyncio.Event | None) -> None:
    """Await ``work``, at most ``timeout_s`` and no longer than until ``hurry``."""
    task = asyncio.ensure_future(work)
    hurried = asyncio.create_task((hurry or asyncio.Event()).wait())
    try:
        await asyncio.wait({task, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        else:
            log.warning("stopping although requests are still running")
    finally:
        for each in (task, hurried):
            each.cancel()
        await asyncio.gather(task, hurried, return_exceptions=True)
