"""The engine of a simulated instance: the real one, stepped by a task in virtual time.

The forward takes its time layer by layer, so that the KV of one layer is on its way while the
next is not written yet, and everything may happen in between.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.core import EngineCore, EngineListener
from engine.kv.manager import KvManager
from engine.mock_runner import MockRunner
from engine.pace import Pace
from engine.plan import StepPlan
from engine.request import Request
from engine.scheduler import Reservation, Scheduler


@dataclass(slots=True)
class StepTimes:
    """How long steps take, and how often one fails."""

    rng: random.Random
    step_s: float = 0.004
    token_s: float = 0.0002
    failure_rate: float = 0.0
    hiccup_rate: float = 0.0
    """Share of steps that take ``hiccup_s`` more."""
    hiccup_s: float = 0.5

    def layer_s(self, plan: StepPlan, num_layers: int) -> float:
        num_tokens = sum(len(sequence.token_ids) for sequence in plan.sequences)
        total_s = self.step_s + self.token_s * num_tokens
        if self.hiccup_rate and self.rng.random() < self.hiccup_rate:
            total_s += self.hiccup_s
        return total_s / num_layers

    def fails(self) -> bool:
        return bool(self.failure_rate) and self.rng.random() < self.failure_rate


class SteppedEngine(EngineCore):
    """An engine whose steps are a task."""

    def __init__(
        self,
        config: EngineConfig,
        runner: MockRunner,
        listener: EngineListener,
        times: StepTimes,
        loop: asyncio.AbstractEventLoop,
        happened: Callable[[str], None],
    ) -> None:
        self.kv = KvManager(
            runner.num_blocks,
            config.block_size,
            runner.model_digest,
            prefix_cache=config.prefix_cache,
            watermark_blocks=1,
        )
        scheduler = Scheduler(
            config, self.kv, runner.model_config.eos_token_ids, runner.max_context
        )
        super().__init__(scheduler, runner, Pace(config), listener, loop.time)
        self._mock = runner
        self._times = times
        self._happened = happened
        self._work = asyncio.Event()
        self.version = 0
        """Grows whenever blocks may have moved."""

    def reserve(self, request: Request) -> Reservation | None:
        self.version += 1
        return super().reserve(request)

    def work_came(self) -> None:
        self.version += 1
        self._work.set()

    async def run(self) -> None:
        """Step for ever."""
        while True:
            self._work.clear()
            plan = self.next_plan()
            self.version += 1
            if plan is None:
                await self._work.wait()
            else:
                await self._forward(plan)

    async def _forward(self, plan: StepPlan) -> None:
        started_s = self.begin(plan)
        layer_s = self._times.layer_s(plan, self._mock.layout.num_layers)
        try:
            wanted = self._listener.wants_layers(plan)
            for layer in self._mock.layers(plan):
                await asyncio.sleep(layer_s)
                self._happened(f"step {plan.step}: layer {layer}")
                if wanted:
                    self._listener.layer_written(plan, layer)
                if self._times.fails():
                    raise RuntimeError("the simulated forward failed")
            result = self._mock.sample(plan)
        except RuntimeError as error:
            self.give_up(plan, error)
        else:
            self.end(plan, result, started_s)
            self._happened(f"step {plan.step}: {sorted(result.token_ids.items())}")
            self.version += 1
