"""What each idea of serving is worth: ``python -m benchmarks.ladder [MODEL]``.

Four ways to serve the same requests with the same kernels and the same KV memory:

    static      a batch begins and ends together; each member has KV for the longest request there
                can be, in one piece. Better than most: who is done is no longer computed
    paged       the same, but a member has KV only for its own prompt and ``max_tokens``, in blocks,
                so that batches are as large as memory allows
    continuous  who is done leaves and the next begins at once; a prompt is read whole, in a step
                of its own; blocks are taken as an answer grows
    chunked     the engine as it is: prompts in chunks beside all decodes, sized by measured speed

Users wait for their answer and ask again: so many requests are there all the time. Answers are
greedy and as long as asked for, so all four write the same tokens. Each way runs in a process of
its own. Prints Markdown. Use a quiet machine and pin it: ``OMP_NUM_THREADS=1 taskset -c 0``.
"""

import argparse
import json
import resource
import subprocess
import sys
from dataclasses import dataclass, replace

from benchmarks.ladder_ways import WAYS, Terms, serve
from engine.config import EngineConfig
from engine.loaders.open import open_model
from engine.runner import Runner

BOUND = 1 / 16
"""Fragmentation of blocks of 16 whose last is half full, in sequences of 128 tokens."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way at one load."""

    way: str
    tokens_per_s: float
    itl_p99_s: float
    itl_p50_s: float
    largest_batch: int
    reserved_bytes: int
    """Most KV that was taken at once."""
    used_ratio: float
    """Of what was taken, how much held tokens: mean over time."""
    preemptions: int
    resident_bytes: int
    """Most that the process had in memory, weights included."""


def measure(model: str, weights: str, way: str, terms: Terms) -> Row:
    """Serve everything once, in this process."""
    files = open_model(model)
    config = EngineConfig(weights=weights, prefix_cache=False)
    layout = files.config.kv_layout("bfloat16", config.block_size)
    num_blocks = terms.kv_tokens // config.block_size
    config = replace(config, kv_cache_bytes=2 * num_blocks * layout.block_bytes)
    runner = Runner(config, files)
    report = serve(way, terms, runner, config)
    gaps = sorted(report.gaps_s)
    return Row(
        way=way,
        tokens_per_s=report.num_tokens / report.elapsed_s,
        itl_p99_s=_quantile(gaps, 0.99),
        itl_p50_s=_quantile(gaps, 0.5),
        largest_batch=report.largest_batch,
        reserved_bytes=report.most_blocks * runner.layout.block_bytes,
        used_ratio=report.used_ratio,
        preemptions=report.num_preemptions,
        resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def in_a_process(arguments: list[str], way: str, concurrency: int) -> Row:
    """The same in a fresh one, so that its memory is its own."""
    only = ["--only", way, "--concurrency", str(concurrency)]
    command = [sys.executable, "-m", "benchmarks.ladder", *arguments, *only]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def table(rows: list[Row]) -> str:
    """Markdown."""
    first = rows[0].tokens_per_s
    lines = [
        "| way | tokens/s | of static | ITL P50, ms | P99, ms | largest batch | KV taken, MiB "
        "| of it used | fragmentation | preemptions | resident, MiB |",
        "| --- " * 11 + "|",
    ]
    for row in rows:
        wasted = 1 - row.used_ratio
        lines.append(
            f"| {row.way} | {row.tokens_per_s:.1f} | {row.tokens_per_s / first:.2f} "
            f"| {row.itl_p50_s * 1e3:.0f} | {row.itl_p99_s * 1e3:.0f} | {row.largest_batch} "
            f"| {row.reserved_bytes / 2**20:.0f} | {row.used_ratio:.1%} "
            f"| {wasted:.2%} ({'within' if wasted <= BOUND else 'over'} {BOUND:.2%}) "
            f"| {row.preemptions} | {row.resident_bytes / 2**20:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=3, help="requests of each user")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[16, 128])
    parser.add_argument("--output-tokens", type=int, nargs=2, default=[16, 384])
    parser.add_argument("--kv-tokens", type=int, default=6144)
    parser.add_argument("--only", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        [concurrency] = options.concurrency
        terms = Terms(
            concurrency=concurrency,
            num_requests=concurrency * options.rounds,
            prompt_tokens=tuple(options.prompt_tokens),
            output_tokens=tuple(options.output_tokens),
            kv_tokens=options.kv_tokens,
        )
        row = measure(options.model, options.weights, options.only, terms)
        print(json.dumps({name: getattr(row, name) for name in Row.__slots__}))
        return
    shared = [
        options.model, "--weights", options.weights, "--rounds", str(options.rounds),
        "--prompt-tokens", *map(str, options.prompt_tokens),
        "--output-tokens", *map(str, options.output_tokens),
        "--kv-tokens", str(options.kv_tokens),
    ]  # fmt: skip
    for concurrency in options.concurrency:
        rows = [in_a_process(shared, way, concurrency) for way in WAYS]
        print(f"{concurrency} users, {options.kv_tokens} tokens of KV\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
