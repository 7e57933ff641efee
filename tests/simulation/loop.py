"""An event loop in virtual time, and processes on it that can be stopped, killed and buried.

Nothing waits: where all is done that is due, the clock jumps to the next timer. A ``Process`` is
whatever runs in its context; stopped, its callbacks pile up as they do under SIGSTOP, and its
timers fire late; killed, not another line of its code runs, no ``finally`` either.

Everything happens in one order that depends on nothing but what the program does: tasks and
futures hash by number, not by address. Knows nothing of what runs on it.
"""

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from enum import Enum, auto
from itertools import count
from typing import Any

_OWNER: ContextVar["Process | None"] = ContextVar("owner", default=None)
_STUCK_TURNS = 100_000
"""So many turns at one instant: somebody runs in circles."""


class ProcessState(Enum):
    RUNNING = auto()
    STOPPED = auto()
    DEAD = auto()


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """A task whose place in a set does not depend on its address."""

    _numbers = count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(self._numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future):  # type: ignore[type-arg]
    """The same of a future."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(_Task._numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class Process:
    """What runs in one context."""

    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        self.name = name
        self.state = ProcessState.RUNNING
        self._loop = loop
        self._context = copy_context()
        self._context.run(_OWNER.set, self)
        self.held: list[asyncio.Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.on_ran: Callable[[], None] | None = None
        """Called when some of its code has run."""

    @property
    def context(self) -> Context:
        """One to run a callback of this process in."""
        return self._context.copy()

    @property
    def is_dead(self) -> bool:
        return self.state is ProcessState.DEAD

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this process, from outside of it."""
        return self._loop.create_task(work, context=self.context)

    def call(self, callback: Callable[..., object], *args: object) -> None:
        """Run a callback in this process, soon."""
        self._loop.call_soon(callback, *args, context=self.context)

    def stop(self) -> None:
        """SIGSTOP."""
        if self.state is ProcessState.RUNNING:
            self.state = ProcessState.STOPPED

    def resume(self) -> None:
        """SIGCONT."""
        if self.state is ProcessState.STOPPED:
            self.state = ProcessState.RUNNING
            self._loop.take_back(self)

    def kill(self) -> None:
        """SIGKILL."""
        self.state = ProcessState.DEAD

    def bury(self) -> None:
        """Let what is left of it end, now that nobody looks. Called when all is over."""
        self.state = ProcessState.RUNNING
        self.on_ran = None
        self._loop.take_back(self)
        for task in self.tasks:
            task.cancel()


class VirtualLoop(asyncio.BaseEventLoop):
    """Timers without waiting. A deadlock raises instead of hanging."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._clock_resolution = 1e-9
        self._turns = 0
        self._strangers: list[asyncio.Task[Any]] = []
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now_s

    def create_future(self) -> "asyncio.Future[Any]":
        return _Future(loop=self)

    def take_back(self, process: Process) -> None:
        """What was held while a process was stopped is due now."""
        held, process.held = process.held, []
        self._ready.extend(held)

    def strangers(self) -> list[asyncio.Task[Any]]:
        """Tasks of no process."""
        return [task for task in self._strangers if not task.done()]

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Any,
        context: Context | None = None,
        **kwargs: Any,
    ) -> asyncio.Task[Any]:
        task = _Task(work, loop=loop, context=context, **kwargs)
        owner = context.get(_OWNER) if context is not None else _OWNER.get()
        (self._strangers if owner is None else owner.tasks).append(task)
        return task

    def _run_once(self) -> None:
        if not self._ready:
            self._jump()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle._cancelled:
                continue
            owner = handle._context.get(_OWNER)
            if owner is None:
                handle._run()
            elif owner.state is not ProcessState.RUNNING:
                owner.held.append(handle)
            else:
                handle._run()
                if owner.on_ran is not None:
                    owner.on_ran()
        self._turns += 1
        if self._turns > _STUCK_TURNS:
            raise RuntimeError(f"{_STUCK_TURNS} turns and it is still {self._now_s:.6f} s")

    def _jump(self) -> None:
        """To the next timer."""
        while self._scheduled and self._scheduled[0]._cancelled:
            heapq.heappop(self._scheduled)._scheduled = False
        if not self._scheduled:
            if self._stopping:
                return
            raise RuntimeError("nothing can happen any more: everybody waits for somebody")
        when_s = self._scheduled[0]._when
        if when_s > self._now_s:
            self._now_s, self._turns = when_s, 0
        while self._scheduled and self._scheduled[0]._when <= self._now_s:
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False
            self._ready.append(handle)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when they are due."""

    def _process_events(self, event_list: object) -> None:
        """There is no I/O."""

    def _write_to_self(self) -> None:
        """Nobody sleeps that could be woken."""
