"""Scheduler and runner of one engine, driven step by step, without threads or services."""

from collections.abc import Sequence

from engine.beams import Hypothesis
from engine.config import EngineConfig
from engine.kv.manager import KvManager
from engine.plan import BeamsEnded, Failed, Sampled
from engine.request import Purpose, Request
from engine.runner import Runner
from engine.scheduler import Scheduler


class Bench:
    """One engine and what it has told."""

    def __init__(
        self, runner: Runner, num_blocks: int = 40, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self.runner = runner
        config = EngineConfig(block_size=16)
        self.kv = KvManager(num_blocks, 16, "m")
        self.scheduler = Scheduler(config, self.kv, eos_token_ids, 250)
        self.sampled: dict[str, list[Sampled]] = {}
        self.found: dict[str, tuple[Hypothesis, ...]] = {}
        """Of searches."""

    def add(self, *requests: Request, purpose: Purpose = Purpose.LOCAL) -> None:
        for arrival_s, request in enumerate(requests):
            self.scheduler.add(request, purpose, float(arrival_s))
            self.scheduler.grant(request.request_id)

    def step(self, limit: int = 1000) -> None:
        plan, _ = self.scheduler.plan(limit)
        for event in self.scheduler.apply(plan, self.runner.run(plan)):
            if isinstance(event, Sampled):
                self.sampled.setdefault(event.request_id, []).append(event)
                if event.finish_reason is not None:
                    self.scheduler.finish(event.request_id)
            elif isinstance(event, BeamsEnded):
                self.found[event.request_id] = event.hypotheses
            assert not isinstance(event, Failed), event

    def run(self, *requests: Request, limit: int = 1000) -> dict[str, list[Sampled]]:
        self.add(*requests)
        while self.scheduler.has_work():
            self.step(limit)
        self.scheduler.check_integrity()
        return self.sampled
