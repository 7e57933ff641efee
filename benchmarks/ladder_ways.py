"""The ways to serve that ``ladder`` compares, over one runner. None of them is made to look bad.

Batches that begin together are planned here; the others are the engine's own scheduler, as
configured. Used by ``ladder`` and its test.
"""

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine.config import EngineConfig
from engine.kv.manager import KvManager
from engine.pace import Pace
from engine.plan import Sampled, ScheduledSequence, StepPlan, StepResult
from engine.request import Purpose, Request, SamplingParams
from engine.runner import Runner
from engine.scheduler import Scheduler

WAYS = ("static", "paged", "continuous", "chunked")


@dataclass(frozen=True, slots=True)
class Terms:
    """What is the same for all."""

    concurrency: int
    num_requests: int
    prompt_tokens: tuple[int, int]
    """Fewest and most of a prompt, drawn evenly."""
    output_tokens: tuple[int, int]
    """The same of an answer. Drawn evenly over its logarithm: most are short, some long."""
    kv_tokens: int
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest request there can be."""
        return self.prompt_tokens[1] + self.output_tokens[1]

    def requests(self, vocab_size: int) -> list[Request]:
        """In the order in which they are asked."""
        chance = random.Random(self.seed)
        low, high = self.output_tokens
        made = []
        for number in range(self.num_requests):
            num_output_tokens = round(low * (high / low) ** chance.random())
            prompt = chance.choices(range(vocab_size), k=chance.randint(*self.prompt_tokens))
            sampling = SamplingParams(
                temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True
            )
            made.append(Request(str(number), tuple(prompt), sampling))
        return made


@dataclass(slots=True)
class Report:
    """What came of it."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    largest_batch: int = 0
    most_blocks: int = 0
    num_preemptions: int = 0
    _used_s: float = 0.0
    _taken_s: float = 0.0
    _last_s: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs.values()))

    @property
    def used_ratio(self) -> float:
        """Of the KV slots that were taken, those that held a token: mean over time."""
        return self._used_s / self._taken_s

    def step(self, elapsed_s: float, num_sequences: int, num_blocks: int, used: float) -> None:
        """A step has ended.

        Args:
            used: share of the slots of these blocks that held tokens.
        """
        self.largest_batch = max(self.largest_batch, num_sequences)
        self.most_blocks = max(self.most_blocks, num_blocks)
        self._taken_s += elapsed_s * num_blocks
        self._used_s += elapsed_s * num_blocks * used

    def token(self, request_id: str, token_id: int, now_s: float) -> None:
        if (last_s := self._last_s.get(request_id)) is not None:
            self.gaps_s.append(now_s - last_s)
        self._last_s[request_id] = now_s
        self.outputs.setdefault(request_id, []).append(token_id)


def serve(way: str, terms: Terms, runner: Runner, config: EngineConfig) -> Report:
    """Answer all requests in one of ``WAYS``."""
    requests = terms.requests(runner.model_config.vocab_size)
    num_blocks = terms.kv_tokens // config.block_size
    report = Report()
    began_s = time.perf_counter()
    if way in ("static", "paged"):
        longest = terms.longest if way == "static" else None
        for batch in batches(requests, terms.concurrency, num_blocks, config.block_size, longest):
            run_batch(batch, runner, config, report)
    else:
        scheduler = Scheduler(
            config_of(way, terms, config),
            KvManager(num_blocks, config.block_size, "ladder", prefix_cache=False),
            (),
            runner.max_context,
        )
        for request in requests:
            scheduler.add(request, Purpose.LOCAL, 0.0)
        run_scheduler(scheduler, runner, Pace(config) if way == "chunked" else None, report)
    report.elapsed_s = time.perf_counter() - began_s
    return report


# ---- batches that begin and end together -----------------------------------------------------


@dataclass(slots=True)
class Member:
    """One request of a batch, and its blocks."""

    request: Request
    block_table: tuple[int, ...]
    output: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.output) == self.request.sampling.max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output)

    def row(self) -> ScheduledSequence:
        """Its prompt, or its newest token."""
        prompt = self.request.prompt_token_ids
        return ScheduledSequence(
            request_id=self.request.request_id,
            token_ids=(self.output[-1],) if self.output else prompt,
            start=self.num_tokens - 1 if self.output else 0,
            block_table=self.block_table,
            samples=True,
            sampling=self.request.sampling,
            prompt_token_ids=prompt,
            output_token_ids=self.output,
        )


def batches(
    requests: Iterable[Request],
    most: int,
    num_blocks: int,
    block_size: int,
    longest: int | None,
) -> Iterator[list[Member]]:
    """First come, first served, as many at once as are there and as memory holds.

    Args:
        longest: tokens that each gets memory for; None: what it asks for.
    """
    batch: list[Member] = []
    taken = 0
    for request in requests:
        wanted = longest or len(request.prompt_token_ids) + request.sampling.max_tokens
        count = -(-wanted // block_size)
        if batch and (len(batch) == most or taken + count > num_blocks):
            yield batch
            batch, taken = [], 0
        batch.append(Member(request, tuple(range(taken, taken + count))))
        taken += count
    yield batch


def run_batch(
    batch: Sequence[Member], runner: Runner, config: EngineConfig, report: Report
) -> None:
    """Prompts, as many in a step as its budget holds, then all answers to the end of the last."""
    num_blocks = sum(len(member.block_table) for member in batch)
    for members in _packed(batch, config.token_budget):
        _step(members, batch, num_blocks, runner, config, report)
    while running := [member for member in batch if not member.is_done]:
        _step(running, batch, num_blocks, runner, config, report)


def _packed(batch: Sequence[Member], token_budget: int) -> Iterator[list[Member]]:
    group: list[Member] = []
    for member in batch:
        if group and sum(each.num_tokens for each in (*group, member)) > token_budget:
            yield group
            group = []
        group.append(member)
    yield group


def _step(
    members: Sequence[Member],
    batch: Sequence[Member],
    num_blocks: int,
    runner: Runner,
    config: EngineConfig,
    report: Report,
) -> None:
    began_s = time.perf_counter()
    result = runner.run(StepPlan(0, tuple(member.row() for member in members)))
    now_s = time.perf_counter()
    for member in members:
        token_id = result.token_ids[member.request.request_id]
        report.token(member.request.request_id, token_id, now_s)
        member.output.append(token_id)
    # Memory of who is done, or has not begun, holds nothing that is still needed.
    needed = sum(m.num_tokens for m in batch if m.output and not m.is_done)
    used = needed / (num_blocks * config.block_size)
    report.step(now_s - began_s, len(batch), num_blocks, used)


# ---- the engine's scheduler ------------------------------------------------------------------


def config_of(way: str, terms: Terms, config: EngineConfig) -> EngineConfig:
    """``continuous`` is prompts first, each whole and alone; ``chunked`` is the default."""
    slots = min(terms.concurrency, config.max_decode_sequences)
    config = replace(config, max_decode_sequences=slots)
    if way == "chunked":
        return config
    return replace(
        config,
        schedule="prefill_first",
        max_prefill_batch=1,
        max_consecutive_prefill_steps=terms.num_requests,
        token_budget=max(config.token_budget, terms.longest + slots),
    )


def run_scheduler(scheduler: Scheduler, runner: Runner, pace: Pace | None, report: Report) -> None:
    """Until nothing is left to do. Without a pace a step is as long as its prompt."""
    while scheduler.has_work():
        began_s = time.perf_counter()
        limit = scheduler.max_sequence_tokens
        if pace is not None:
            limit = pace.limit_tokens(scheduler.chunks_ride_beside_decodes)
        plan, _ = scheduler.plan(limit)
        result: StepResult = runner.run(plan)
        now_s = time.perf_counter()
        if pace is not None:
            pace.observe(plan.num_prefill_tokens, plan.num_decode_tokens, now_s - began_s)
        used = 1 - scheduler.kv.fragmentation_ratio()
        report.step(now_s - began_s, scheduler.num_running, scheduler.kv.stats().held, used)
        for event in scheduler.apply(plan, result):
            if isinstance(event, Sampled):
                report.token(event.request_id, event.token_id, now_s)
    report.num_preemptions = scheduler.stats().num_preemptions
