"""The step thread of an engine: one per instance.

Waits for work, steps, and begins again. What a step is, and everything that may be asked of an
engine meanwhile, is ``engine.core``'s. Started and stopped by ``services.worker``.
"""

import logging
import threading
import time
from collections.abc import Callable

from engine.core import EngineCore, EngineListener, StepRunner
from engine.pace import Pace
from engine.plan import StepPlan
from engine.scheduler import Scheduler

log = logging.getLogger(__name__)


class Engine(EngineCore):
    """One scheduler and one runner on a thread of their own."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        pace: Pace,
        listener: EngineListener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(scheduler, runner, pace, listener, clock)
        self._changed = threading.Condition(self._lock)
        self._dirty = False
        self._stopping = False
        self._bug: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def raise_bug(self) -> None:
        """Raises: Exception: the bug that ended the step thread; without it nothing is computed."""
        if self._bug is not None:
            raise self._bug

    def stop(self) -> None:
        """Idempotent. Returns when the running step has ended; what is queued stays unanswered."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def work_came(self) -> None:
        self._dirty = True
        self._changed.notify()

    def _run(self) -> None:
        try:
            while (plan := self._wait_for_plan()) is not None:
                self.step(plan)
        except Exception as bug:
            log.critical("the step thread died: %s", type(bug).__name__, exc_info=bug)
            self._bug = bug

    def _wait_for_plan(self) -> StepPlan | None:
        """None when stopping."""
        while not self._stopping:
            self._dirty = False
            if (plan := self.next_plan()) is not None:
                return plan
            with self._changed:
                self._changed.wait_for(lambda: self._dirty or self._stopping)
        return None
