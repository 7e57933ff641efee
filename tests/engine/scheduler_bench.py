"""A scheduler on a bench: short calls for the examples, and a check of all accounts after each."""

from engine.config import EngineConfig
from engine.kv.manager import KvManager
from engine.plan import EngineEvent, Sampled, StepPlan, StepResult
from engine.request import Purpose, Request, SamplingParams
from engine.scheduler import Scheduler

BLOCK = 16
EOS = 2
LONG = SamplingParams(max_tokens=1000)


class Bench:
    """A scheduler, and a runner that samples one fixed token."""

    def __init__(
        self,
        num_blocks: int = 20,
        budget: int = 256,
        slots: int = 8,
        watermark: int = 0,
        max_context: int = 1000,
        schedule: str = "decode_first",
        prefill_batch: int = 64,
        prefill_steps: int = 4,
    ) -> None:
        self.kv = KvManager(num_blocks, BLOCK, "m", watermark_blocks=watermark)
        config = EngineConfig(
            token_budget=budget,
            max_decode_sequences=slots,
            schedule=schedule,
            max_prefill_batch=prefill_batch,
            max_consecutive_prefill_steps=prefill_steps,
        )
        self.scheduler = Scheduler(config, self.kv, [EOS], max_context)
        self.token_id = 7
        self.picked: list[str] = []
        self.num_added = 0

    def add(
        self,
        request_id: str,
        num_tokens: int,
        purpose: Purpose = Purpose.LOCAL,
        sampling: SamplingParams = LONG,
        priority: int = 0,
    ) -> None:
        """Prompts of different requests share nothing."""
        self.num_added += 1
        request = self.request(request_id, num_tokens, sampling, priority)
        self.scheduler.add(request, purpose, float(self.num_added))

    def request(
        self, request_id: str, num_tokens: int, sampling: SamplingParams = LONG, priority: int = 0
    ) -> Request:
        first = sum(request_id.encode()) * 1000
        return Request(request_id, tuple(range(first, first + num_tokens)), sampling, priority)

    def plan(self, limit: int = 1000) -> StepPlan:
        plan, picked = self.scheduler.plan(limit)
        self.scheduler.check_integrity()
        self.picked += [event.request_id for event in picked]
        return plan

    def apply(self, plan: StepPlan) -> list[EngineEvent]:
        samplers = [each for row in plan.sequences for each in row.samplers]
        tokens = {each.request_id: self.token_id for each in samplers}
        events = self.scheduler.apply(plan, StepResult(tokens))
        self.scheduler.check_integrity()
        return events

    def step(self, limit: int = 1000) -> list[EngineEvent]:
        return self.apply(self.plan(limit))

    def run_out(self, request_id: str) -> list[Sampled]:
        """Steps until the answer ends; its tokens."""
        told: list[Sampled] = []
        while not told or told[-1].finish_reason is None:
            told += [
                event
                for event in self.step()
                if isinstance(event, Sampled) and event.request_id == request_id
            ]
        return told


def spans(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(row.request_id, row.start, row.end) for row in plan.sequences]
