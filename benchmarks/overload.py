"""Three times what a cluster can do, for a minute: ``python -m benchmarks.overload [MODEL]``.

    1  capacity   users who ask again at once, more of them until no more answers come
    2  peak       arrivals at shares of it: the most answers a second that meet both objectives
    3  overload   arrivals at ``--times`` capacity; refusals must be quick, good answers go on
    4  afterwards half of capacity; normal again from the first second in which all are good

Arrivals do not wait for answers, and all times count from the scheduled arrival, so neither a slow
server nor a slow client is flattered; how late the client itself sent is stated. Prints a table,
and fails where a promise is broken. Use a quiet machine with a core for the client.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.serve import Answered, Server, make_prompt, percentile, poisson
from benchmarks.started import started

SHARES = (0.5, 0.7, 0.85, 1.0)
"""Of capacity, at which the peak of goodput is looked for."""
GOOD_SHARE, REFUSED_WITHIN_S, NORMAL_WITHIN_S = 0.9, 0.1, 5.0
"""What is promised."""
AFTERWARDS_S = 10.0
PAUSE_S = 0.1
"""Of a user who was refused."""
REFUSED = "HTTP 429"


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a good answer meets, in seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; times of ``perf_counter``, in seconds."""

    answered: Answered
    sent_s: float
    ended_s: float

    @property
    def was_refused(self) -> bool:
        return self.answered.error.startswith(REFUSED)

    @property
    def took_s(self) -> float:
        """From its scheduled arrival to its end."""
        return self.ended_s - self.answered.scheduled_s

    def is_good(self, objectives: Objectives) -> bool:
        answered = self.answered
        if answered.error:
            return False
        written_s = answered.token_times_s[-1] - answered.token_times_s[0]
        tpot_s = written_s / max(1, answered.output_tokens - 1)
        return answered.ttft_s <= objectives.ttft_s and tpot_s <= objectives.tpot_s


class Client:
    """Asks for prompts of one length, each unlike the others."""

    def __init__(self, server: Server, prompt_tokens: int, output_tokens: int) -> None:
        self._server = server
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._dice = random.Random(0)

    async def ask(self, scheduled_s: float) -> Asked:
        prompt = make_prompt(self._prompt_tokens, self._dice)
        sent_s = time.perf_counter()
        answered = await self._server.complete(prompt, self._output_tokens, scheduled_s)
        return Asked(answered, sent_s, time.perf_counter())

    async def arrivals(self, rate: float, seconds: float) -> list[Asked]:
        """Poisson arrivals at ``rate`` a second; returns when all have ended."""
        began_s = time.perf_counter()
        tasks = []
        for at_s in poisson(max(1, round(rate * seconds)), rate, self._dice):
            await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask(began_s + at_s)))
        return await asyncio.gather(*tasks)

    async def capacity(self, seconds: float) -> float:
        """Answers a second of users who ask again at once; doubled until that gains little."""
        best, users = 0.0, 2
        while True:
            rate = await self._by_users(users, seconds)
            if rate < best * 1.1:
                return max(best, rate)
            best, users = rate, users * 2

    async def _by_users(self, users: int, seconds: float) -> float:
        began_s = time.perf_counter()
        filled_s, until_s = began_s + seconds / 3, began_s + seconds
        ended: list[float] = []

        async def user() -> None:
            while time.perf_counter() < until_s:
                asked = await self.ask(time.perf_counter())
                if asked.answered.error:
                    await asyncio.sleep(PAUSE_S)
                else:
                    ended.append(asked.ended_s)

        await asyncio.gather(*(user() for _ in range(users)))
        return sum(filled_s <= moment <= until_s for moment in ended) / (until_s - filled_s)


def goodput(asked: Sequence[Asked], objectives: Objectives, seconds: float) -> float:
    """Good answers a second, of those that arrived in so many seconds."""
    return sum(each.is_good(objectives) for each in asked) / seconds


def normal_after_s(asked: Sequence[Asked], objectives: Objectives, began_s: float) -> float:
    """Seconds after ``began_s`` since which every arrival was good; 0: all of them."""
    bad = [each.answered.scheduled_s for each in asked if not each.is_good(objectives)]
    return max((moment - began_s for moment in bad), default=0.0)


def broken_promises(peak: float, good: float, refused_s: float, normal_s: float) -> list[str]:
    """A line for each promise that was not kept."""
    broken = []
    if good < GOOD_SHARE * peak:
        broken.append(f"goodput fell to {good / peak:.0%} of its peak: promised {GOOD_SHARE:.0%}")
    if refused_s > REFUSED_WITHIN_S:
        broken.append(f"a refusal took {refused_s:.3f} s: promised {REFUSED_WITHIN_S:g} s")
    if normal_s > NORMAL_WITHIN_S:
        broken.append(f"not normal for {normal_s:.1f} s: promised {NORMAL_WITHIN_S:g} s")
    return broken


def row(name: str, rate: float, asked: Sequence[Asked], objectives: Objectives, s: float) -> str:
    """One line of the table; ``s`` is how long requests arrived."""
    refusals = [each.took_s for each in asked if each.was_refused]
    failed = sum(bool(each.answered.error) and not each.was_refused for each in asked)
    ttfts = [each.answered.ttft_s for each in asked if not each.answered.error]
    late = percentile([each.sent_s - each.answered.scheduled_s for each in asked], 99)
    refused = _ms(refusals, 50, 99, 100)
    return (
        f"| {name} | {rate:.2f} | {goodput(asked, objectives, s):.2f} | {len(ttfts)} "
        f"| {len(refusals)} | {failed} | {_ms(ttfts, 50, 99)} | {refused} | {late * 1e3:.0f} |"
    )


def _ms(values: Sequence[float], *percents: float) -> str:
    if not values:
        return "none"
    return " / ".join(f"{percentile(values, each) * 1e3:.0f}" for each in percents)


async def measure(client: Client, options: argparse.Namespace) -> list[str]:
    """Print the table; returns the promises that were broken."""
    objectives = Objectives(options.ttft_s, options.tpot_s)
    capacity = await client.capacity(options.step_s)
    print("| phase | arrivals/s | good/s | answered | refused | failed ", end="")
    print("| TTFT p50 / p99 ms | refused p50 / p99 / max ms | sent late p99 ms |")
    print("| --- " * 9 + "|")
    peak = 0.0
    for share in SHARES:
        rate = share * capacity
        asked = await client.arrivals(rate, options.step_s)
        peak = max(peak, goodput(asked, objectives, options.step_s))
        print(row(f"{share:.0%} of capacity", rate, asked, objectives, options.step_s))
    if not peak:
        raise SystemExit("no answer met the objectives: raise --ttft-s or --tpot-s")
    rate = options.times * capacity
    overload = asyncio.create_task(client.arrivals(rate, options.seconds))
    await asyncio.sleep(options.seconds)
    over_s = time.perf_counter()
    calm = await client.arrivals(capacity / 2, AFTERWARDS_S)
    asked = await overload
    print(row(f"overload, {options.times:g}x", rate, asked, objectives, options.seconds))
    print(row("afterwards", capacity / 2, calm, objectives, AFTERWARDS_S))
    good = goodput(asked, objectives, options.seconds)
    refusals = [each.took_s for each in asked if each.was_refused]
    normal_s = normal_after_s(calm, objectives, over_s)
    print(f"\ncapacity {capacity:.2f} answers/s; goodput under overload {good / peak:.0%} of its")
    print(f"peak; all good again {normal_s:.1f} s after it")
    return broken_promises(peak, good, percentile(refusals or [0.0], 99), normal_s)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--prefill", default="1")
    parser.add_argument("--decode", default="1")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--ttft-s", type=float, default=2.0, help="objective")
    parser.add_argument("--tpot-s", type=float, default=0.1, help="objective")
    parser.add_argument("--times", type=float, default=3.0, help="capacity")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--step-s", type=float, default=15.0, help="of each earlier phase")
    options = parser.parse_args()
    # Who would wait longer than the objective is refused: an answer that late helps nobody.
    limits = ("--max-wait-s", str(options.ttft_s / 2), "--threads", "1")
    slos = ("--ttft-slo-s", str(options.ttft_s), "--tpot-slo-s", str(options.tpot_s))
    counts = ("--prefill", options.prefill, "--decode", options.decode)
    with started("serve", options.model, *counts, *limits, *slos) as running:
        server = Server(f"http://{running.http}", "")
        await server.find_model()
        client = Client(server, options.prompt_tokens, options.output_tokens)
        broken = await measure(client, options)
    for line in broken:
        print(line, file=sys.stderr)
    if broken:
        raise SystemExit(1)


if __name__ == "__main__":
    asyncio.run(main())
