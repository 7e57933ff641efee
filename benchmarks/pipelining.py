"""How busy each role is, and what users wait: ``python -m benchmarks.pipelining [MODEL]``.

The same load on three clusters of two instances, a thread each:

    serial     two colocated instances that write one answer at a time
    colocated  two colocated instances, continuous batching
    1P1D       one prefill and one decode instance, the KV handed over

Users ask, wait for the whole answer and ask again, so ``--users`` requests are there all the time.
The busy share is the time an instance spent in steps, by its own metrics, over the measured part of
a run; TTFT and TPOT are the clients'. Runs alternate between the clusters, because machines drift.
Prints a Markdown table. Use a quiet machine with a core an instance, and one for the client.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serve import Answered, Server, make_prompt, percentile
from benchmarks.started import started

WAYS: Mapping[str, tuple[str, ...]] = {
    "serial": ("--colocated", "2", "--max-decode-sequences", "1", "--max-prefill-batch", "1"),
    "colocated": ("--colocated", "2"),
    "1P1D": ("--prefill", "1", "--decode", "1", "--disaggregate-from", "0"),
}
"""What each cluster is started with."""
PAUSE_S = 1.0
"""Of a user whose request failed."""


@dataclass(frozen=True, slots=True)
class Load:
    """What users do; times in seconds."""

    users: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    warm_up_s: float
    measured_s: float


@dataclass(slots=True)
class Seen:
    """What was seen of one cluster, in all its runs."""

    busy: dict[str, list[float]] = field(default_factory=dict)
    """Shares by role, one for each run."""
    answers: list[Answered] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    num_failed: int = 0


@contextlib.contextmanager
def cluster(model: str, options: tuple[str, ...]) -> Iterator[str]:
    """``kvrelay serve`` in processes of its own, until the block ends; its HTTP address."""
    # Nobody is refused for having to wait: waiting is what is measured.
    patience = ("--threads", "1", "--max-wait-s", "3600")
    with started("serve", model, *patience, *options) as running:
        yield running.http


def step_seconds(address: str) -> dict[str, dict[str, float]]:
    """Role -> instance -> seconds in steps since its start, as the instances say."""
    with urllib.request.urlopen(f"http://{address}/metrics/targets", timeout=10) as answer:
        [found] = json.load(answer)
    result: dict[str, dict[str, float]] = {}
    for target in found["targets"]:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "kvrelay_step_seconds_sum":
                    by_instance = result.setdefault(sample.labels["role"], {})
                    by_instance[sample.labels["instance"]] = sample.value
    return result


def busy_shares(
    before: Mapping[str, Mapping[str, float]],
    after: Mapping[str, Mapping[str, float]],
    elapsed_s: float,
) -> dict[str, float]:
    """By role, the mean over its instances."""
    return {
        role: statistics.mean(
            (total - before[role][instance]) / elapsed_s for instance, total in instances.items()
        )
        for role, instances in after.items()
    }


async def run(address: str, load: Load, seed: int, seen: Seen) -> None:
    """One run; adds to ``seen`` what fell into its measured part."""
    server = Server(f"http://{address}", "")
    await server.find_model()
    dice = random.Random(seed)
    answers: list[Answered] = []
    over = asyncio.Event()

    async def user() -> None:
        while not over.is_set():
            prompt = make_prompt(dice.randint(*load.prompt_tokens), dice)
            output_tokens = dice.randint(*load.output_tokens)
            answered = await server.complete(prompt, output_tokens, time.perf_counter())
            answers.append(answered)
            if answered.error:
                print(answered.error, file=sys.stderr)
                await asyncio.sleep(PAUSE_S)

    users = [asyncio.create_task(user()) for _ in range(load.users)]
    await asyncio.sleep(load.warm_up_s)
    before, began_s = await asyncio.to_thread(step_seconds, address), time.perf_counter()
    await asyncio.sleep(load.measured_s)
    after, ended_s = await asyncio.to_thread(step_seconds, address), time.perf_counter()
    over.set()
    await asyncio.gather(*users)
    for role, share in busy_shares(before, after, ended_s - began_s).items():
        seen.busy.setdefault(role, []).append(share)
    seen.num_failed += sum(bool(each.error) for each in answers)
    good = [each for each in answers if not each.error]
    seen.answers += [each for each in good if began_s <= each.token_times_s[0] <= ended_s]
    moments = [moment for each in good for moment in each.token_times_s]
    num_tokens = sum(began_s <= moment <= ended_s for moment in moments)
    seen.tokens_per_s.append(num_tokens / (ended_s - began_s))


def tpot_s(answered: Answered) -> float:
    """Mean gap between the tokens of one answer."""
    first_s, *_, last_s = answered.token_times_s
    return (last_s - first_s) / (answered.output_tokens - 1)


def row(way: str, seen: Seen) -> str:
    """One line of the table."""
    ttfts = [each.ttft_s for each in seen.answers]
    tpots = [
        tpot_s(each)
        for each in seen.answers
        if each.output_tokens > 1 and len(each.token_times_s) > 1
    ]
    shares = ", ".join(f"{role} {statistics.mean(seen.busy[role]):.0%}" for role in seen.busy)
    mean = statistics.mean([share for each in seen.busy.values() for share in each])
    ttft = f"{percentile(ttfts, 50) * 1e3:.0f}" if ttfts else "none"
    tpot = f"{percentile(tpots, 50) * 1e3:.1f}" if tpots else "none"
    rate = statistics.mean(seen.tokens_per_s)
    return (
        f"| {way} | {shares} | {mean:.0%} | {ttft} | {tpot} | {rate:.0f} "
        f"| {len(seen.answers)} | {seen.num_failed} |"
    )


def measure(model: str, load: Load, rounds: int) -> dict[str, Seen]:
    """All clusters, ``rounds`` times in turn."""
    seen = {way: Seen() for way in WAYS}
    for number in range(rounds):
        for way, options in WAYS.items():
            with cluster(model, options) as address:
                asyncio.run(run(address, load, number, seen[way]))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[128, 512])
    parser.add_argument("--output-tokens", type=int, nargs=2, default=[32, 128])
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured part of a run")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    load = Load(
        options.users,
        tuple(options.prompt_tokens),
        tuple(options.output_tokens),
        options.warm_up,
        options.seconds,
    )
    seen = measure(options.model, load, options.rounds)
    print(f"{options.users} users\n")
    names = ("cluster", "busy", "mean", "TTFT p50, ms", "TPOT p50, ms", "output tokens/s")
    print(f"| {' | '.join(names)} | answers | failed |")
    print("| --- " * 8 + "|")
    for way, each in seen.items():
        print(row(way, each))


if __name__ == "__main__":
    main()
