"""The router alone, against mock instances: ``python -m benchmarks.router [MODEL]``.

    tokens    long answers at full speed: tokens a second of the router's CPU time
    requests  answers of one token at full speed: requests a second of its CPU time
    latency   a token of every stream each 20 ms: from leaving the instance to the client
    memory    streams that hardly move: what the router grows by, for each

Rates are over the CPU time that the router's process used, so they are what a core of its own would
give, whatever the instances and the client cost. Latency includes both hops and the client's own
reading. Each line is a router and instances of its own. Prints a Markdown table.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc
import psutil

from benchmarks.serve import percentile
from benchmarks.started import Started, started
from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from protos import inference_pb2 as public

PROMPT = tuple(range(97, 97 + 26))
STREAMS_PER_CHANNEL = 100
LATENCY_STEP_S, HELD_STEP_S = 0.02, 1.0
HELD_TOKENS = 4000
START_S = 60.0
MIB = 2**20


@dataclass(slots=True)
class Counted:
    """What clients got."""

    num_requests: int = 0
    num_tokens: int = 0
    delays_s: list[float] | None = None
    """Of each token, from its instance; None: not wanted."""


@dataclass(frozen=True, slots=True)
class Used:
    """What the router's process used."""

    cpu_s: float
    rss_bytes: int

    @classmethod
    def by(cls, process: psutil.Process) -> "Used":
        times = process.cpu_times()
        return cls(times.user + times.system, process.memory_info().rss)


@contextlib.contextmanager
def mock_cluster(model: str, count: int, step_s: float) -> Iterator[Started]:
    """A router and its mock instances, ready, until the block ends."""
    many = ("--internal-port", "0", "--max-requests", "100000", "--max-wait-s", "3600")
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(started("router", model, *many))
        with grpc.insecure_channel(running.grpc) as channel:
            status = cluster_pb2_grpc.StatusStub(channel)
            served = status.GetStatus(cluster_pb2.GetStatusRequest(), timeout=START_S).model
            for _ in range(count):
                stack.enter_context(_mock(running.internal, served, step_s))
            until_s = time.monotonic() + START_S
            while _num_ready(status) < count:
                if time.monotonic() > until_s:
                    raise SystemExit("the mock instances did not start")
                time.sleep(0.05)
        yield running


@contextlib.contextmanager
def _mock(router: str, model: str, step_s: float) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.mock_instance", router, model]
    process = subprocess.Popen([*command, "--step-s", str(step_s)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _num_ready(status: cluster_pb2_grpc.StatusStub) -> int:
    instances = status.GetStatus(cluster_pb2.GetStatusRequest(), timeout=START_S).instances
    return sum(each.state == "ready" for each in instances)


@contextlib.asynccontextmanager
async def stubs(
    address: str, streams: int
) -> AsyncIterator[list[inference_pb2_grpc.InferenceStub]]:
    """One for each stream; some share a connection."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            for _ in range(-(-streams // STREAMS_PER_CHANNEL))
        ]
        yield [
            inference_pb2_grpc.InferenceStub(channels[i // STREAMS_PER_CHANNEL])
            for i in range(streams)
        ]


async def ask(stub: inference_pb2_grpc.InferenceStub, tokens: int, counted: Counted) -> None:
    """One whole answer, added to ``counted`` as it comes."""
    request = public.GenerateRequest(
        prompt_token_ids=public.TokenIds(ids=PROMPT),
        sampling=public.SamplingParams(max_tokens=tokens, ignore_eos=True),
    )
    async for response in stub.Generate(request):
        if response.HasField("tokens"):
            counted.num_tokens += len(response.tokens.token_ids)
            if counted.delays_s is not None and response.tokens.text:
                now_s = time.monotonic()
                counted.delays_s += [now_s - float(t) for t in response.tokens.text.split()]
        elif response.HasField("finished"):
            counted.num_requests += 1


async def busy(
    running: Started, streams: int, tokens: int, seconds: float, counted: Counted
) -> tuple[float, float]:
    """Streams that ask again at once; wall and router's CPU seconds of the measured part."""
    router = psutil.Process(running.pid)
    over = False

    async def user(stub: inference_pb2_grpc.InferenceStub) -> None:
        while not over:
            await ask(stub, tokens, counted)

    async with stubs(running.grpc, streams) as each:
        users = [asyncio.create_task(user(stub)) for stub in each]
        await asyncio.sleep(seconds / 4)
        counted.num_requests = counted.num_tokens = 0
        if counted.delays_s is not None:
            counted.delays_s.clear()
        before, began_s = Used.by(router), time.monotonic()
        await asyncio.sleep(seconds)
        cpu_s, elapsed_s = Used.by(router).cpu_s - before.cpu_s, time.monotonic() - began_s
        seen = (counted.num_requests, counted.num_tokens)
        over = True
        await asyncio.gather(*users)
    counted.num_requests, counted.num_tokens = seen
    return elapsed_s, cpu_s


async def held(running: Started, streams: int) -> float:
    """Bytes that the router grows by for each of so many open streams."""
    router, counted = psutil.Process(running.pid), Counted()
    async with stubs(running.grpc, streams) as each:
        await ask(each[0], 2, counted)
        before = Used.by(router)
        asked = []
        for number, stub in enumerate(each):
            asked.append(asyncio.create_task(ask(stub, HELD_TOKENS, counted)))
            if number % STREAMS_PER_CHANNEL == 0:
                await asyncio.sleep(0.1)  # clients come one after the other
        until_s = time.monotonic() + START_S
        while counted.num_tokens < 2 * streams:
            await asyncio.sleep(0.1)
            for failed in (task for task in asked if task.done()):
                failed.result()
            if time.monotonic() > until_s:
                raise SystemExit(f"{streams} streams did not all get tokens in {START_S:g} s")
        grown = Used.by(router).rss_bytes - before.rss_bytes
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return grown / streams


def rate_row(name: str, count: int, wall_s: float, cpu_s: float) -> str:
    """What was done a second of the router's CPU, how busy that was, and a second of time."""
    as_run = f"{count / wall_s:,.0f}/s at {cpu_s / wall_s:.0%}"
    return f"| {name} | {count / cpu_s:,.0f} a core | {as_run} |"


def measure(options: argparse.Namespace) -> None:
    """Print the table."""
    print(f"{options.instances} mock instances, {options.streams} streams\n")
    print("| | of the router | as run |\n| --- | --- | --- |")
    for name, tokens in (("tokens", 256), ("requests", 1)):
        counted = Counted()
        with mock_cluster(options.model, options.instances, 0.0) as running:
            wall_s, cpu_s = asyncio.run(
                busy(running, options.streams, tokens, options.seconds, counted)
            )
        count = counted.num_tokens if name == "tokens" else counted.num_requests
        print(rate_row(name, count, wall_s, cpu_s), flush=True)
    counted = Counted(delays_s=[])
    assert counted.delays_s is not None
    with mock_cluster(options.model, options.instances, LATENCY_STEP_S) as running:
        wall_s, cpu_s = asyncio.run(
            busy(running, options.latency_streams, 100, options.seconds, counted)
        )
    middle, late = (percentile(counted.delays_s, each) * 1e3 for each in (50, 99))
    load = f"{counted.num_tokens / wall_s:,.0f} tokens/s at {cpu_s / wall_s:.0%}"
    print(f"| latency p50 / p99 | {middle:.2f} / {late:.2f} ms | {load} |", flush=True)
    with mock_cluster(options.model, options.instances, HELD_STEP_S) as running:
        each_bytes = asyncio.run(held(running, options.held_streams))
    total = each_bytes * options.held_streams / MIB
    print(f"| memory a stream | {each_bytes / 1024:.1f} KiB | {total:.0f} MiB", end="")
    print(f" for {options.held_streams:,} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", default="demo", help="its tokenizer is all that is used"
    )
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--streams", type=int, default=64, help="at full speed")
    parser.add_argument("--latency-streams", type=int, default=16)
    parser.add_argument("--held-streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=10.0, help="measured part of each line")
    os.environ.setdefault("KVRELAY_CLUSTER_TOKEN", secrets.token_hex(16))
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
