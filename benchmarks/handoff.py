"""What a handoff costs beside its bare transfer: ``python -m benchmarks.handoff [--quick]``.

KV is computed already, so nothing hides: the gap between first and second token is what the
transfer takes. Each transport is compared with its own raw transfer, measured in the same run
between the same two processes: a memcpy for shared_memory, a bare stream of 1 MiB messages for
grpc. Then a prefill of a known length sends over throttled links, layer by layer and all at its
end. Prints Markdown tables. The target is a child process (``benchmarks.handoff_target``).
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from dataclasses import dataclass

import grpc
import numpy as np

from benchmarks.handoff_target import LAYOUT, RAW, Memory
from kvtransfer.source import KvSource, SourceHandoff
from kvtransfer.stats import HandoffStats
from kvtransfer.transports.interface import Connect
from kvtransfer.transports.remote import SERVER_OPTIONS, RemoteConnector
from kvtransfer.transports.throttle import Throttle, throttled

TRANSPORTS = ("shared_memory", "grpc")
SIZES = (128, 512, 1024, 2048, 4096, 8192)
RATIOS = (0.1, 0.5, 1.0, 2.0)
PREFILL_TOKENS, CHUNK_TOKENS, PREFILL_S = 2048, 512, 1.0
MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Landing:
    """What the target says of one handoff."""

    landed_s: float
    """On the clock that all processes of a machine share."""
    cpu_s: float
    """Its processor time until then."""


class Target:
    """The child process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    @classmethod
    async def start(cls) -> "Target":
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.handoff_target", stdin=pipe, stdout=pipe
        )
        assert process.stdout is not None
        return cls(process, f"127.0.0.1:{int(await process.stdout.readline())}")

    def expect(self, handoff_id: bytes, num_held_tokens: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{handoff_id.hex()} {num_held_tokens}\n".encode())

    async def landed(self) -> Landing:
        assert self.process.stdout is not None
        landed_s, cpu_s = (await self.process.stdout.readline()).split()
        return Landing(float(landed_s), float(cpu_s))

    async def stop(self) -> None:
        self.process.kill()
        await self.process.wait()


@dataclass(frozen=True)
class Handoff:
    """One measured handoff."""

    gap_s: float
    """First token known -> everything landed."""
    total_s: float
    """Offer -> released."""
    stats: HandoffStats


async def hand_over(source: KvSource, target: Target, num_tokens: int, held: int = 0) -> Handoff:
    """Everything is readable at once."""
    begin_s = time.monotonic()
    handoff = offer(source, target, num_tokens, held)
    await handoff.granted()
    for layer in range(LAYOUT.num_layers):
        handoff.layer_ready(layer, num_tokens)
    first_s = time.monotonic()
    handoff.first(num_tokens, 1)
    stats = await handoff.released()
    end_s = time.monotonic()
    landing = await target.landed()
    return Handoff(landing.landed_s - first_s, end_s - begin_s, stats)


def offer(source: KvSource, target: Target, num_tokens: int, held: int = 0) -> SourceHandoff:
    handoff_id = os.urandom(16)
    target.expect(handoff_id, held)
    blocks = range(LAYOUT.num_blocks_for(num_tokens))
    return source.offer(handoff_id, target.address, "target", "r", num_tokens, [], blocks)


def memcpy_s(memory: Memory, num_bytes: int) -> float:
    """One copy of so many bytes of KV, as large pieces."""
    from_, to = memory.flat(), np.ones(memory.num_bytes, np.uint8)
    begin_s = time.monotonic()
    for start in range(0, num_bytes, MESSAGE_BYTES):
        end = min(start + MESSAGE_BYTES, num_bytes)
        np.copyto(to[start:end], from_[start:end])
    return time.monotonic() - begin_s


class RawStream:
    """A bare gRPC stream to the target: bytes in, one word back when all are read."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=SERVER_OPTIONS)

    async def push_s(self, num_bytes: int) -> float:
        message = bytes(MESSAGE_BYTES)
        begin_s = time.monotonic()
        call = self.channel.stream_unary(RAW)()
        for start in range(0, num_bytes, MESSAGE_BYTES):
            await call.write(message[: num_bytes - start])
        await call.done_writing()
        await call
        return time.monotonic() - begin_s


async def compare(target: Target, memory: Memory, sizes: tuple[int, ...], repeats: int) -> None:
    """The table of gaps."""
    raw = RawStream(target.address)
    await raw.push_s(MESSAGE_BYTES)
    print(f"{LAYOUT.block_bytes / LAYOUT.block_size / 1000:.0f} KB a token; medians of {repeats}\n")
    print("| transport | tokens | MB | raw ms | gap ms | above raw ms | GB/s | of raw |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for transport in TRANSPORTS:
        source = make_source(memory, RemoteConnector(transport=transport))
        await hand_over(source, target, 1024)
        for num_tokens in sizes:
            num_bytes = LAYOUT.num_blocks_for(num_tokens) * LAYOUT.block_bytes
            gaps, raws = [], []
            for _ in range(repeats):
                in_memory = transport == "shared_memory"
                raws.append(
                    memcpy_s(memory, num_bytes) if in_memory else await raw.push_s(num_bytes)
                )
                gaps.append((await hand_over(source, target, num_tokens)).gap_s)
            raw_s, gap_s = statistics.median(raws), statistics.median(gaps)
            print(
                f"| {transport} | {num_tokens} | {num_bytes / 1e6:.1f} | {raw_s * 1e3:.2f} "
                f"| {gap_s * 1e3:.2f} | {(gap_s - raw_s) * 1e3:+.2f} "
                f"| {num_bytes / gap_s / 1e9:.2f} "
                f"| {raw_s / gap_s:.0%} |",
                flush=True,
            )
        await costs(transport, source, target, repeats)
        await source.aclose()
    await raw.channel.close()


async def costs(transport: str, source: KvSource, target: Target, repeats: int) -> None:
    """Printed below a transport's rows: control alone, and processor time of both ends."""
    control = [(await hand_over(source, target, 8192, 8192)).total_s for _ in range(10 * repeats)]
    num_tokens, handoffs = 2048, 2 * repeats
    target_s = await _target_cpu_s(source, target)
    own_s = time.process_time()
    for _ in range(handoffs):
        await hand_over(source, target, num_tokens)
    own_s = time.process_time() - own_s
    target_s = await _target_cpu_s(source, target) - target_s
    gigabytes = handoffs * LAYOUT.num_blocks_for(num_tokens) * LAYOUT.block_bytes / 1e9
    print(
        f"| {transport} | control alone: {statistics.median(control) * 1e6:.0f} us | | | | "
        f"| CPU s/GB: | {own_s / gigabytes:.2f} source + {target_s / gigabytes:.2f} target |"
    )


async def _target_cpu_s(source: KvSource, target: Target) -> float:
    handoff = offer(source, target, 16, 16)
    handoff.first(16, 1)
    await handoff.released()
    return (await target.landed()).cpu_s


def make_source(memory: Memory, connect: Connect) -> KvSource:
    return KvSource(f"source-{os.urandom(4).hex()}", "digest", LAYOUT, memory, connect)


async def prefill(source: KvSource, target: Target, layer_wise: bool) -> tuple[float, HandoffStats]:
    """Seconds from the start of a prefill of ``PREFILL_S`` until everything landed."""
    handoff = offer(source, target, PREFILL_TOKENS)
    await handoff.granted()
    begin_s = time.monotonic()
    chunks = PREFILL_TOKENS // CHUNK_TOKENS
    steps = [(chunk, layer) for chunk in range(chunks) for layer in range(LAYOUT.num_layers)]
    for number, (chunk, layer) in enumerate(steps, 1):
        await asyncio.sleep(begin_s + PREFILL_S * number / len(steps) - time.monotonic())
        if layer_wise:
            handoff.layer_ready(layer, (chunk + 1) * CHUNK_TOKENS)
    for layer in range(LAYOUT.num_layers):
        handoff.layer_ready(layer, PREFILL_TOKENS)
    handoff.first(PREFILL_TOKENS, 1)
    stats = await handoff.released()
    return (await target.landed()).landed_s - begin_s, stats


async def hide(target: Target, memory: Memory) -> None:
    """The table of throttled links."""
    num_bytes = PREFILL_TOKENS // LAYOUT.block_size * LAYOUT.block_bytes
    print(f"\nA prefill of {PREFILL_S:g} s, {PREFILL_TOKENS} tokens, chunks of {CHUNK_TOKENS}\n")
    print("| transfer / prefill | limit s | layer-wise s | above limit | hidden | at the end s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for ratio in RATIOS:
        link = Throttle(bytes_per_s=num_bytes / (ratio * PREFILL_S))
        source = make_source(memory, throttled(RemoteConnector(), link))
        await hand_over(source, target, LAYOUT.block_size)
        layer_wise_s, stats = await prefill(source, target, True)
        at_end_s, _ = await prefill(source, target, False)
        last_s = ratio * PREFILL_S * CHUNK_TOKENS / PREFILL_TOKENS / LAYOUT.num_layers
        limit_s = max(PREFILL_S, ratio * PREFILL_S) + last_s
        print(
            f"| {ratio:g} | {limit_s:.3f} | {layer_wise_s:.3f} | {layer_wise_s / limit_s - 1:+.1%} "
            f"| {stats.hidden_ratio:.1%} | {at_end_s:.3f} |",
            flush=True,
        )
        await source.aclose()


async def run(sizes: tuple[int, ...], repeats: int) -> None:
    memory = Memory(max(SIZES) // LAYOUT.block_size)
    memory.fill()
    target = await Target.start()
    try:
        await compare(target, memory, sizes, repeats)
        await hide(target, memory)
    finally:
        await target.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three sizes, three times each")
    quick = parser.parse_args().quick
    asyncio.run(run((128, 1024, 8192) if quick else SIZES, 3 if quick else 9))


if __name__ == "__main__":
    main()
