"""Runs scenarios by seed, tells what went wrong, and how to see it again.

A run is a function of its seed alone: the same log comes out every time.
"""

import asyncio
import gc
from dataclasses import dataclass

from tests.simulation.cluster import Cluster
from tests.simulation.loop import VirtualLoop
from tests.simulation.scenario import Scenario, draw

_BURIAL_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Report:
    """One run."""

    scenario: Scenario
    log: tuple[str, ...]
    wrong: Exception | None

    @property
    def told(self) -> str:
        """For whoever wants to know why."""
        end = "\n".join(self.log[-40:])
        again = f"python -m tests.simulation --seed {self.scenario.seed}"
        return f"{self.wrong!r}\nthe last events:\n{end}\nthe whole run again: {again}"


def run_seed(seed: int) -> Report:
    """The run of one seed."""
    return run(draw(seed))


def run(scenario: Scenario) -> Report:
    """One run, on a loop of its own."""
    loop = VirtualLoop()
    wrong: Exception | None = None
    asyncio.set_event_loop(loop)
    cluster = Cluster(scenario, loop)
    try:
        loop.run_until_complete(cluster.run())
    except Exception as error:
        wrong = error
    finally:
        bury(cluster, loop)
        asyncio.set_event_loop(None)
        loop.close()
    return Report(scenario, tuple(cluster.log), wrong)


def bury(cluster: Cluster, loop: VirtualLoop) -> None:
    """Let all that is left of a run end, so that nothing of it reaches the next."""
    for _ in range(_BURIAL_ROUNDS):
        for process in cluster.processes():
            process.bury()
        for task in loop.strangers():
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        if not asyncio.all_tasks(loop):
            return
    gc.collect()
    raise RuntimeError(f"tasks that do not end: {asyncio.all_tasks(loop)}")
