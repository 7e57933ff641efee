"""Where requests go, and what it does to TTFT: ``python -m benchmarks.placement TRACE``.

Replays a trace (JSON lines: timestamp in ms, input_length, output_length, hash_ids of 512 tokens
each, as the Mooncake paper published them, https://arxiv.org/abs/2407.00079) over instances in
virtual time: the real placement, rates and cache index, the real engine with its scheduler and
prefix cache, and a model of how long steps take. Lengths are scaled down so that one hash id is
one block; the clock is scaled so that prefill would be ``--load`` busy if nothing were cached.

The defaults of the time model are the demo model's on one core (``benchmarks.cpu``): 0.6 ms a
prompt token, 3.5 ms a decode step and 0.9 ms a sequence in it. ``--burst`` asks 20 long prompts at
once beside steady decodes instead, with and without a TTFT objective.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks.placement_world import BLOCK, MODEL, Asked, TimeModel, World
from engine.kv.prefix import block_hashes, root_hash
from engine.request import Request, SamplingParams
from services.router.disaggregation import Rules
from services.runtime.settings import PlacementPolicy, Role

TRACE_BLOCK = 512
ROOT = root_hash(MODEL)


def _asked(number: int, tokens: tuple[int, ...], max_tokens: int, at_s: float) -> Asked:
    sampling = SamplingParams(0.0, max_tokens=max_tokens, ignore_eos=True)
    hashes = block_hashes(ROOT, tokens, BLOCK)
    return Asked(Request(f"r{number}", tokens, sampling), at_s, hashes)


def read_trace(path: str, num_requests: int) -> list[tuple[float, tuple[int, ...], int]]:
    """(seconds, prompt, output tokens), scaled so that a hash id is one block."""
    requests = []
    with Path(path).open(encoding="utf-8") as lines:
        for line in itertools.islice(lines, num_requests):
            entry = json.loads(line)
            ids = (hash_id * BLOCK + i for hash_id in entry["hash_ids"] for i in range(BLOCK))
            length = max(1, entry["input_length"] * BLOCK // TRACE_BLOCK)
            output = max(1, entry["output_length"] * BLOCK // TRACE_BLOCK)
            tokens = tuple(itertools.islice(ids, length))
            requests.append((entry["timestamp"] / 1000, tokens, output))
    return requests


def at_load(
    trace: Sequence[tuple[float, tuple[int, ...], int]],
    load: float,
    num_prefill: int,
    token_s: float,
) -> list[Asked]:
    """The trace, as fast as makes the prefill instances ``load`` busy if nothing is cached."""
    work_s = sum(len(tokens) for _, tokens, _ in trace) * token_s
    stretch = work_s / num_prefill / load / max(1e-9, trace[-1][0] - trace[0][0])
    return [
        _asked(n, tokens, output, (at_s - trace[0][0]) * stretch)
        for n, (at_s, tokens, output) in enumerate(trace)
    ]


def burst() -> list[Asked]:
    """Steady short requests, and at 5 s twenty prompts of 1,500 tokens at once."""
    prompts = itertools.count(1)

    def fresh(length: int) -> tuple[int, ...]:
        first = next(prompts) << 16
        return tuple(range(first, first + length))

    steady = [_asked(n, fresh(48), 120, n * 0.15) for n in range(120)]
    return steady + [_asked(1000 + n, fresh(1500), 32, 5.0) for n in range(20)]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", help="JSON lines; not with --burst")
    parser.add_argument("--burst", action="store_true")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=2000, help="KV blocks of an instance")
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--token-ms", type=float, default=0.6)
    parser.add_argument("--pair-us", type=float, default=0.1)
    parser.add_argument("--step-ms", type=float, default=3.5)
    parser.add_argument("--sequence-ms", type=float, default=0.9)
    parser.add_argument("--kv-token-us", type=float, default=10.0)
    args = parser.parse_args()
    times = TimeModel(
        args.token_ms / 1e3,
        args.pair_us / 1e6,
        args.step_ms / 1e3,
        args.sequence_ms / 1e3,
        args.kv_token_us / 1e6,
    )
    if args.burst:
        _burst(args, times)
        return
    if args.trace is None:
        parser.error("name a trace, or say --burst")
    trace = read_trace(args.trace, args.requests)
    print(f"{len(trace)} requests, {args.prefill}P{args.decode}D, load {args.load:g}\n")
    print("| placement | TTFT mean, s | p50 | p99 | prompt tokens cached |")
    print("| --- | --- | --- | --- | --- |")
    for policy in PlacementPolicy:
        world = World(Rules(0, policy), times, args.prefill, args.decode, args.blocks)
        done = world.replay(at_load(trace, args.load, args.prefill, times.token_s))
        ttfts = [asked.ttft_s for asked in done]
        readers = [i for i in world.instances.values() if i.role is Role.PREFILL]
        hits = sum(i.kv.num_hit_tokens for i in readers)
        asked_for = sum(i.kv.num_query_tokens for i in readers)
        print(
            f"| {policy.value} | {mean(ttfts):.3f} | {percentile(ttfts, 0.5):.3f} "
            f"| {percentile(ttfts, 0.99):.3f} | {hits / max(1, asked_for):.0%} |"
        )


def _burst(args: argparse.Namespace, times: TimeModel) -> None:
    print("| TTFT objective | p95 TTFT of the burst, s | p99 ITL of the steady ones, ms |")
    print("| --- | --- | --- |")
    for objective_s in (0.0, 1.0):
        rules = Rules(0, PlacementPolicy.COST, ttft_slo_s=objective_s, tpot_slo_s=0.06)
        world = World(rules, times, args.prefill, args.decode, args.blocks)
        done = world.replay(burst())
        long = [a.ttft_s for a in done if len(a.request.prompt_token_ids) > 1000]
        gaps = [g for a in done if len(a.request.prompt_token_ids) < 100 for g in a.gaps_s]
        name = f"{objective_s:g} s" if objective_s else "none: nothing is deflected"
        print(f"| {name} | {percentile(long, 0.95):.2f} | {percentile(gaps, 0.99) * 1e3:.0f} |")


if __name__ == "__main__":
    main()
