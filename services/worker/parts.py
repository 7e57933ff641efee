"""The parts of an instance that start, drain and stop: engine thread, snapshots, registrations.

Used by ``services.worker.app`` only, which knows their order.
"""

import asyncio
from collections.abc import Callable, Sequence

from engine.loop import Engine
from services.runtime.errors import Internal
from services.runtime.lifecycle import Component
from services.worker.registration import Registration

SNAPSHOT_S = 0.25
LOOK_S = 1.0
HANG_S = 10.0
"""A step that takes so long will not end: the process does, and a new one takes its place."""


class EngineThread(Component):
    """The step thread; ends when everything that could ask it has stopped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def start(self) -> None:
        self._engine.start()

    async def watch(self) -> None:
        """Raise when the step thread died, or hangs in one step.

        Looks are counted instead of seconds: a process that was paused has not looked.
        """
        looks, seen = 0, None
        while True:
            await asyncio.sleep(LOOK_S)
            self._engine.raise_bug()
            step = self._engine.step_in_flight
            looks = looks + 1 if step is not None and step == seen else 0
            seen = step
            if looks * LOOK_S >= HANG_S:
                raise Internal(f"the engine hangs: step {step} has not ended in {HANG_S:g} s")

    async def stop(self) -> None:
        await asyncio.to_thread(self._engine.stop)


class Snapshots(Component):
    """Takes a look at the numbers now and then."""

    def __init__(self, take: Callable[[], None]) -> None:
        self._take = take
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="snapshots")

    async def watch(self) -> None:
        assert self._task is not None
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._take()
            await asyncio.sleep(SNAPSHOT_S)


class Registrations(Component):
    """One instance's membership with every router."""

    def __init__(self, registrations: Sequence[Registration]) -> None:
        self._registrations = registrations
        self._starting: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return when one router knows us; the others follow as they can be reached.

        Raises:
            FailedPrecondition: a router refused this instance; the message says why.
        """
        self._starting = [asyncio.create_task(each.start()) for each in self._registrations]
        done, _ = await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def watch(self) -> None:
        """Raise when a router refuses us."""
        await asyncio.gather(*self._starting)
        await asyncio.gather(*(each.watch() for each in self._registrations))

    async def tell(self) -> None:
        """Tell every router how we are, at once."""
        await asyncio.gather(*(each.tell() for each in self._registrations))

    async def renew(self) -> None:
        """Tell every router what we are now."""
        await asyncio.gather(*(each.renew() for each in self._registrations))

    async def stop(self) -> None:
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(each.stop() for each in self._registrations))
