"""A scheduler, a runner that reads its tokens back from block memory, and unruly services.

Between plan and apply, requests are aborted, reservations granted, handed-off KV lands, rows
fail and whole steps crash. Whatever block is given away too early is written by two, and the
runner's checksums do not let that pass. Used by the random tests of the scheduler.
"""

import random
from dataclasses import dataclass, field
from functools import cache

from engine.config import EngineConfig
from engine.kv.manager import KvManager
from engine.mock_runner import MockRunner, answer, next_token
from engine.plan import (
    EngineEvent,
    Failed,
    Picked,
    Sampled,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from engine.request import FinishReason, Purpose, Request, SamplingParams, forks_of
from engine.scheduler import Scheduler

EOS = ord("q")
MAX_CONTEXT = 120


@cache
def long_answer(prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    return answer(prompt, MAX_CONTEXT - len(prompt), sampling)


def undisturbed(request: Request, limit_tokens: int) -> tuple[list[int], FinishReason]:
    """What the answer is when nothing goes wrong, and how it ends."""
    output: list[int] = []
    drawn = SamplingParams(request.sampling.temperature, seed=request.sampling.seed)
    for token_id in long_answer(request.prompt_token_ids, drawn):
        if token_id == EOS and not request.sampling.ignore_eos:
            return output, FinishReason.STOP
        if token_id in request.sampling.stop_token_ids:
            return output, FinishReason.STOP
        output.append(token_id)
        num_tokens = len(request.prompt_token_ids) + len(output)
        if len(output) == request.sampling.max_tokens or num_tokens == limit_tokens:
            return output, FinishReason.LENGTH
    raise AssertionError("the answer has no end")


@dataclass
class Job:
    """One answer as its service sees it."""

    request: Request
    purpose: Purpose
    family: "list[Job]"
    """All answers to one request; the first is in the scheduler under the request's own id."""
    output: list[int] = field(default_factory=list)
    ended: FinishReason | None = None
    table: tuple[int, ...] = ()
    num_landed_tokens: int = 0
    is_picked: bool = False
    is_granted: bool = False
    is_joined: bool = False
    is_computed: bool = False  # SOURCE: the first token was sampled
    is_born: bool = False  # it has a first token

    @property
    def leads(self) -> bool:
        return self is self.family[0]


@dataclass(frozen=True)
class Chances:
    """Per step, or per job and step."""

    abort: float = 0.02
    lose_row: float = 0.03
    fail_row: float = 0.01
    crash: float = 0.01


class Simulation:
    """Every call ends with a check that all accounts agree."""

    def __init__(
        self, seed: int, num_blocks: int, block_size: int, watermark: int, config: EngineConfig
    ) -> None:
        self.rng = random.Random(seed)
        self.config = config
        self.kv = KvManager(num_blocks, block_size, "m", watermark_blocks=watermark)
        self.scheduler = Scheduler(config, self.kv, [EOS], MAX_CONTEXT)
        self.runner = MockRunner(num_blocks, block_size, num_layers=1)
        self.jobs: dict[str, Job] = {}
        self.quarantined: list[tuple[int, ...]] = []
        self.now_s = 0.0
        self.chances = Chances()
        self.num_steps = 0
        self.num_waits = 0

    # ---- requests --------------------------------------------------------------------------

    def submit(self, request: Request, purpose: Purpose) -> Job:
        family: list[Job] = []
        family += [Job(each, purpose, family) for each in forks_of(request)]
        self.jobs |= {job.request.request_id: job for job in family}
        if purpose is not Purpose.TARGET:
            self.scheduler.add(request, purpose, self.now_s)
        self.check()
        return family[0]

    def live(self, purpose: Purpose | None = None) -> list[Job]:
        return [
            job
            for job in self.jobs.values()
            if job.ended is None and purpose in (None, job.purpose)
        ]

    def end(self, job: Job, reason: FinishReason) -> None:
        assert job.ended is None, "two terminal events"
        job.ended = reason

    def abort(self, job: Job) -> None:
        """A stop string ends one answer, a client that leaves all of them."""
        if job.is_born and job.purpose is not Purpose.SOURCE and self.rng.random() < 0.5:
            family = [job]
        else:
            family = job.family
        for each in family:
            if each.ended is None:
                self.end(each, FinishReason.ABORT)
            if each.table and not each.is_joined and self.rng.random() < 0.5:
                self.quarantined.append(self.scheduler.quarantine(each.request.request_id))
                each.is_joined = True
            self.scheduler.finish(each.request.request_id)
            self.scheduler.finish(each.request.request_id)
            self.check()

    # ---- handoffs --------------------------------------------------------------------------

    def move_handoffs(self, chance: float) -> None:
        for job in self.live(Purpose.SOURCE):
            if not job.leads or self.rng.random() > chance:
                continue
            if job.is_computed:
                assert all(each.is_computed for each in job.family)
                for each in job.family:
                    self.end(each, FinishReason.LENGTH)
                self.scheduler.finish(job.request.request_id)
            elif job.is_picked and not job.is_granted:
                job.is_granted = True
                self.scheduler.grant(job.request.request_id)
        # Like the service: the first that has no blocks asks, the others wait for it.
        leaders = [job for job in self.live(Purpose.TARGET) if job.leads]
        for job in [job for job in leaders if not job.table][:1]:
            self.reserve(job)
        for job in leaders:
            if job.table and not job.is_joined and self.rng.random() < chance:
                self.land(job)
        self.disturb_quarantined(chance)
        self.check()

    def reserve(self, job: Job) -> None:
        reservation = self.scheduler.reserve(job.request, self.now_s)
        if reservation is not None:
            job.table = reservation.block_table
            job.num_landed_tokens = reservation.num_cached_tokens
            assert job.num_landed_tokens < len(job.request.prompt_token_ids)

    def land(self, job: Job) -> None:
        """Some more of the prompt's KV arrives; after the last of it, decode."""
        prompt = job.request.prompt_token_ids
        start = job.num_landed_tokens
        end = min(len(prompt), start + self.rng.randint(1, 40))
        self.write(prompt[start:end], start, job.table)
        job.num_landed_tokens = end
        if end < len(prompt):
            return
        firsts = [next_token(prompt, each.request.sampling) for each in job.family]
        for each, token_id in zip(job.family, firsts, strict=True):
            each.is_joined = each.is_born = True
            reason = self.scheduler.finish_reason(each.request, token_id, 1)
            if reason is not FinishReason.STOP:
                each.output.append(token_id)
            if reason is not None:
                self.end(each, reason)
        self.scheduler.join(job.request.request_id, *firsts)

    def write(self, token_ids: tuple[int, ...], start: int, table: tuple[int, ...]) -> None:
        sampling = Request("w", ()).sampling
        row = ScheduledSequence("w", token_ids, start, table, False, sampling)
        self.runner.run(StepPlan(0, (row,)))

    def disturb_quarantined(self, chance: float) -> None:
        """Their remote writer is still at it, until it is proven quiet."""
        for block_ids in list(self.quarantined):
            for block_id in block_ids:
                self.runner.cache.region(0, block_id)[:8] = b"scribble"
            if self.rng.random() < chance / 3:
                self.quarantined.remove(block_ids)
                self.kv.release_quarantine(block_ids)

    # ---- steps -----------------------------------------------------------------------------

    def step(self, limit_tokens: int) -> StepPlan:
        self.now_s += 0.1
        self.num_steps += 1
        plan, picked = self.scheduler.plan(limit_tokens)
        self.check()
        self.check_plan(plan, limit_tokens)
        self.hear(list(picked))
        self.interfere()
        if not plan.sequences:
            return plan
        result = self.spoil(plan, self.runner.run(plan))
        self.interfere()
        if self.rng.random() < self.chances.crash:
            ids = [row.request_id for row in plan.sequences]
            self.hear(self.scheduler.fail(ids, "crashed"))
        else:
            self.hear(self.scheduler.apply(plan, result))
        self.check()
        return plan

    def interfere(self) -> None:
        self.move_handoffs(0.5)
        for job in self.live():
            if self.rng.random() < self.chances.abort:
                self.abort(job)

    def spoil(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Throw rows away, with garbage in their slots, and fail others."""
        assert not result.failures, result.failures
        tokens, failures = dict(result.token_ids), {}
        for row in plan.sequences:
            if row.samples and self.rng.random() < self.chances.lose_row:
                del tokens[row.request_id]
                self.write(tuple(reversed(row.token_ids)), row.start, row.block_table)
            elif row.samples and self.rng.random() < self.chances.fail_row:
                failures[row.request_id] = "spoiled"
        return StepResult(tokens, failures)

    def hear(self, events: list[EngineEvent]) -> None:
        for event in events:
            job = self.jobs[event.request_id]
            match event:
                case Picked():
                    assert not job.is_picked, "picked twice"
                    job.is_picked = True
                case Failed():
                    self.end(job, FinishReason.ERROR)
                case Sampled() if job.purpose is Purpose.SOURCE:
                    assert not job.is_computed and event.finish_reason is None
                    prompt = job.request.prompt_token_ids
                    assert event.token_id == next_token(prompt, job.request.sampling)
                    job.is_computed = True
                case Sampled():
                    assert job.ended is None, "a token after the end"
                    job.is_born = True
                    if event.finish_reason is not FinishReason.STOP:
                        job.output.append(event.token_id)
                    if event.finish_reason is not None:
                        self.end(job, event.finish_reason)

    # ---- what always holds -----------------------------------------------------------------

    def check(self) -> None:
        self.scheduler.check_integrity()

    def check_plan(self, plan: StepPlan, limit_tokens: int) -> None:
        block_size = self.kv.block_size
        rows = plan.sequences
        assert len({row.request_id for row in rows}) == len(rows)
        assert plan.num_tokens == sum(len(row.token_ids) for row in rows)
        assert plan.num_tokens <= self.config.token_budget
        assert plan.num_prefill_tokens <= max(limit_tokens, block_size)
        assert plan.num_decode_tokens <= self.config.max_decode_sequences
        self.check_turn(plan)
        for number, row in enumerate(rows):
            job = self.jobs[row.request_id]
            assert row.token_ids and len(row.block_table) * block_size >= row.end
            assert job.purpose is not Purpose.SOURCE or job.is_granted
            known = (*job.request.prompt_token_ids, *job.output)
            assert row.token_ids == known[row.start : row.end]
            assert row.samples == (row.end == len(known))
            if number < plan.num_decode_tokens:
                assert len(row.token_ids) == 1 and row.samples
            else:
                assert row.samples or row.end % block_size == 0

    def check_turn(self, plan: StepPlan) -> None:
        num_decoding = self.scheduler.stats().num_decoding
        num_prompts = len(plan.sequences) - plan.num_decode_tokens
        assert num_prompts <= self.config.max_prefill_batch
        if self.config.schedule == "decode_first" or not num_prompts:
            assert plan.num_decode_tokens == num_decoding
        else:
            assert plan.num_decode_tokens == 0
        # No decode is kept waiting for longer than the schedule allows.
        waits = num_decoding > 0 and plan.num_decode_tokens == 0
        self.num_waits = self.num_waits + 1 if waits else 0
        assert self.num_waits <= self.config.max_consecutive_prefill_steps

    def check_answer(self, job: Job) -> None:
        limit_tokens = self.scheduler.max_sequence_tokens
        expected, reason = undisturbed(job.request, limit_tokens)
        if job.ended in (FinishReason.STOP, FinishReason.LENGTH):
            assert (job.output, job.ended) == (expected, reason)
        else:
            assert job.output == expected[: len(job.output)]

    def check_over(self) -> None:
        """Everything has ended, and nothing is held."""
        for block_ids in self.quarantined:
            self.kv.release_quarantine(block_ids)
        self.quarantined.clear()
        stats = self.kv.stats()
        assert stats.held == stats.quarantined == 0
        assert not self.scheduler.has_work()
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        self.check()
