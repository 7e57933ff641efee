"""Loads any OpenAI-compatible server and says what its clients see.

    python -m benchmarks.serve URL waves   [--concurrency 1 4 8 16] [--output-tokens 128]
    python -m benchmarks.serve URL mixed   --rate 2.41 [--requests 24]
    python -m benchmarks.serve URL mixed   --rate inf         (all at once: saturation)

``waves``: C requests at once, then the next C; output tokens a second, the prompts' time included.
``mixed``: prompts log-uniform between 32 and 1,500 tokens, 64 new tokens, Poisson arrivals.
Latency counts from the scheduled arrival, so a server that falls behind is not flattered. The
client is a bare socket reader: on a small machine its own cost would be the server's loss.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

WORDS = (Path(__file__).parent / "data" / "prose.txt").read_text("utf-8").split()
TOKENS_PER_WORD = 1.25
SHORTEST_TOKENS, LONGEST_TOKENS = 32, 1500


@dataclass(slots=True)
class Answered:
    """One request as its client saw it; times in seconds."""

    scheduled_s: float
    token_times_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.scheduled_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times_s)]


def make_prompt(num_tokens: int, dice: random.Random) -> str:
    """About so many tokens of prose from a random place, unlike any other prompt from its start."""
    start = dice.randrange(len(WORDS))
    count = max(1, int(num_tokens / TOKENS_PER_WORD) - 3)
    words = (WORDS[(start + i) % len(WORDS)] for i in range(count))
    return f"{dice.randrange(10**6)} " + " ".join(words)


class Server:
    """An HTTP server that speaks OpenAI's completions."""

    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._model = model

    async def find_model(self) -> None:
        """Take the first model that the server lists, unless one was named."""
        if not self._model:
            status, body = await self._get("/v1/models")
            if status != 200:
                raise SystemExit(f"{self._host}:{self._port}/v1/models answered {status}")
            self._model = json.loads(body)["data"][0]["id"]

    async def complete(self, prompt: str, output_tokens: int, scheduled_s: float) -> Answered:
        """Stream one completion of exactly ``output_tokens`` tokens, where the server can."""
        answered = Answered(scheduled_s)
        asked = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            await self._stream(json.dumps(asked).encode(), answered)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            answered.error = f"{type(error).__name__}: {error}"
        if not answered.token_times_s and not answered.error:
            answered.error = "no token came"
        return answered

    async def _get(self, path: str) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(self._head("GET", path, 0))
        answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        if b"chunked" in head.lower():
            body = body[body.index(b"{") : body.rindex(b"}") + 1]
        return int(head.split()[1]), body

    async def _stream(self, body: bytes, answered: Answered) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 22)
        try:
            writer.write(self._head("POST", "/v1/completions", len(body)) + body)
            status = int((await reader.readline()).split()[1])
            if status != 200:
                answered.error = f"HTTP {status}: {(await reader.read(2000)).decode()[-300:]}"
                return
            while line := await reader.readline():
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    return
                self._note(json.loads(line[6:]), answered)
        finally:
            writer.close()

    def _note(self, chunk: dict[str, Any], answered: Answered) -> None:
        if "error" in chunk:
            raise ValueError(chunk["error"])
        if chunk.get("choices") and chunk["choices"][0].get("text"):
            answered.token_times_s.append(time.perf_counter())
        if usage := chunk.get("usage"):
            answered.prompt_tokens = usage["prompt_tokens"]
            answered.output_tokens = usage["completion_tokens"]

    def _head(self, method: str, path: str, length: int) -> bytes:
        return (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
            "Connection: close\r\n\r\n"
        ).encode()


async def waves(server: Server, options: argparse.Namespace) -> None:
    """Output tokens/s at each concurrency."""
    dice = random.Random(f"waves {options.seed}")
    print("| C | output tokens/s | TTFT p50 ms | ITL p50 / p99 / max ms |")
    print("| --- | --- | --- | --- |")
    for concurrency in options.concurrency:
        answers: list[Answered] = []
        began_s = time.perf_counter()
        for _ in range(options.waves):
            now_s = time.perf_counter()
            prompts = [make_prompt(options.prompt_tokens, dice) for _ in range(concurrency)]
            answers += await asyncio.gather(
                *(server.complete(p, options.output_tokens, now_s) for p in prompts)
            )
        elapsed_s = time.perf_counter() - began_s
        good = _good(answers)
        rate = sum(a.output_tokens for a in good) / elapsed_s
        ttft = percentile([a.ttft_s for a in good], 50)
        print(f"| {concurrency} | {rate:.0f} | {ttft * 1e3:.0f} | {_gaps(good)} |")


async def mixed(server: Server, options: argparse.Namespace) -> None:
    """Latencies under Poisson arrivals of mixed prompts."""
    # No prompt of one rate begins like one of another: a prefix cache must not answer for it.
    dice = random.Random(f"mixed {options.rate} {options.seed}")
    lengths = log_uniform(options.requests, dice)
    arrivals = poisson(options.requests, options.rate, dice)
    loop_s = time.perf_counter()
    tasks = []
    for length, at_s in zip(lengths, arrivals, strict=True):
        prompt = make_prompt(length, dice)
        scheduled_s = loop_s + at_s
        await asyncio.sleep(max(0.0, scheduled_s - time.perf_counter()))
        tasks.append(
            asyncio.create_task(server.complete(prompt, options.output_tokens, scheduled_s))
        )
    answers = await asyncio.gather(*tasks)
    good = _good(answers)
    elapsed_s = max(a.token_times_s[-1] for a in good) - loop_s
    ttfts = [a.ttft_s for a in good]
    tokens = statistics.mean(a.prompt_tokens for a in good)
    print(f"{len(good)} requests, mean prompt {tokens:.0f} tokens, {options.output_tokens} new")
    print("| served req/s | TTFT p50 / p99 ms | ITL p50 / p99 / max ms |")
    print("| --- | --- | --- |")
    ttft = " / ".join(f"{percentile(ttfts, p) * 1e3:.0f}" for p in (50, 99))
    print(f"| {len(good) / elapsed_s:.2f} | {ttft} | {_gaps(good)} |")


def log_uniform(count: int, dice: random.Random) -> list[int]:
    """Prompt lengths in random order; the same ones, evenly spread, for every seed and rate."""
    low, high = math.log(SHORTEST_TOKENS), math.log(LONGEST_TOKENS)
    lengths = [int(math.exp(low + (high - low) * (i + 0.5) / count)) for i in range(count)]
    dice.shuffle(lengths)
    return lengths


def poisson(count: int, rate: float, dice: random.Random) -> list[float]:
    """Arrival times of a Poisson process, scaled so that the mean rate is exactly ``rate``."""
    times = list(itertools.accumulate(dice.expovariate(1.0) for _ in range(count)))
    return [t * (count / rate) / times[-1] for t in times]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _gaps(answers: list[Answered]) -> str:
    gaps = [gap for a in answers for gap in a.gaps_s] or [0.0]
    middle, late = percentile(gaps, 50) * 1e3, percentile(gaps, 99) * 1e3
    return f"{middle:.1f} / {late:.1f} / {max(gaps) * 1e3:.1f}"


def _good(answers: Sequence[Answered]) -> list[Answered]:
    failed = [a.error for a in answers if a.error]
    if failed:
        print(f"{len(failed)} of {len(answers)} requests failed, the first with: {failed[0]}")
    good = [a for a in answers if not a.error]
    if not good:
        raise SystemExit("no request was answered")
    return good


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="http://HOST:PORT of the server")
    parser.add_argument("load", choices=("waves", "mixed"))
    parser.add_argument("--model", default="", help="default: the first one the server lists")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int)
    parser.add_argument("--rate", type=float, default=1.0, help="requests/s; inf: all at once")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.output_tokens = options.output_tokens or (128 if options.load == "waves" else 64)
    server = Server(options.url, options.model)
    await server.find_model()
    warm_up = make_prompt(options.prompt_tokens, random.Random(-1))
    await server.complete(warm_up, 8, time.perf_counter())
    await (waves if options.load == "waves" else mixed)(server, options)


if __name__ == "__main__":
    asyncio.run(main())
