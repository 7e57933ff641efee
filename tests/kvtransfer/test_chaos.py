"""Many handoffs over few blocks while everything misbehaves at random, by seed.

Blocks are reused as soon as they may be, and poisoned meanwhile: a byte that is written late, or
read after its block was let go, shows.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from kvtransfer.errors import HandoffError
from kvtransfer.transports.loopback import Faults
from protos import kv_transfer_pb2 as pb
from tests.kvtransfer.fakes import ADDRESS, LAYOUT, FakeMemory, Pair, make_pair, new_id

NUM_HANDOFFS = 40
AT_ONCE = 8
NUM_SOURCE_BLOCKS = 20
NUM_TARGET_BLOCKS = 14
POISON = b"\xa5" * LAYOUT.region_bytes


class Chaos(Faults):
    """Drops, doubles, holds back, damages; by chance."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        self.rng = rng
        self.rate = rate
        self.held: dict[object, list[object]] = {}

    async def control(self, to_target: bool, frame: pb.ControlFrame) -> Sequence[pb.ControlFrame]:
        if frame.WhichOneof("frame") == "hello":
            return (frame,)
        return await self._mangle(to_target, frame)  # type: ignore[return-value]

    async def data(self, message: bytes) -> Sequence[bytes]:
        if self.rng.random() < self.rate / 8:
            position = self.rng.randrange(24, len(message))
            message = message[:position] + bytes([message[position] ^ 4]) + message[position + 1 :]
        return await self._mangle("data", message)  # type: ignore[return-value]

    async def _mangle(self, way: object, message: object) -> list[object]:
        held = self.held.setdefault(way, [])
        chance = self.rng.random()
        if chance < self.rate / 2:
            return []
        if chance < self.rate:
            held.append(message)  # it comes after its successors, perhaps much later
            return []
        if chance < 1.5 * self.rate:
            await asyncio.sleep(self.rng.random() / 100)
        arrived = [message, message] if chance > 1 - self.rate else [message]
        if held and self.rng.random() < 0.3:
            arrived.append(held.pop(0))
        return arrived


class Blocks:
    """A pool whose free blocks are poisoned, and found poisoned when they are taken."""

    def __init__(self, memory: FakeMemory, count: int, rng: random.Random) -> None:
        self.memory = memory
        self.free = list(range(count))
        self.rng = rng
        self.moved = asyncio.Condition()
        self._poison(self.free)

    async def take(self, count: int) -> list[int]:
        async with self.moved:
            await self.moved.wait_for(lambda: len(self.free) >= count)
            self.rng.shuffle(self.free)
            taken, self.free = self.free[:count], self.free[count:]
        for layer in self.memory.read(taken):
            assert set(layer) == {POISON}, "a block was written while nobody held it"
        return taken

    async def give_back(self, blocks: list[int]) -> None:
        self._poison(blocks)
        async with self.moved:
            self.free += blocks
            self.moved.notify_all()

    def _poison(self, blocks: list[int]) -> None:
        for layer in range(LAYOUT.num_layers):
            for block in blocks:
                self.memory.region(layer, block)[:] = POISON


class Storm:
    """All handoffs of one run."""

    def __init__(self, pair: Pair, rng: random.Random) -> None:
        self.pair = pair
        self.rng = rng
        self.source_blocks = Blocks(pair.source_memory, NUM_SOURCE_BLOCKS, rng)
        self.target_blocks = Blocks(pair.target_memory, NUM_TARGET_BLOCKS, rng)
        self.written: dict[bytes, list[list[bytes]]] = {}
        self.outcomes: Counter[str] = Counter()
        self.turn = asyncio.Semaphore(AT_ONCE)

    async def one(self) -> None:
        async with self.turn:
            handoff_id, num_tokens = new_id(), self.rng.randint(1, 5 * LAYOUT.block_size)
            ends = [self.source(handoff_id, num_tokens), self.target(handoff_id, num_tokens)]
            self.rng.shuffle(ends)
            await asyncio.gather(*ends)

    async def nap(self) -> None:
        if self.rng.random() < 0.5:
            await asyncio.sleep(self.rng.random() / 50)

    async def source(self, handoff_id: bytes, num_tokens: int) -> None:
        blocks = await self.source_blocks.take(LAYOUT.num_blocks_for(num_tokens))
        rng = random.Random(handoff_id)
        for layer in range(LAYOUT.num_layers):
            for block in blocks:
                view = self.pair.source_memory.region(layer, block)
                view[:] = rng.randbytes(LAYOUT.region_bytes)
        self.written[handoff_id] = self.pair.source_memory.read(blocks)
        await self.nap()
        sending = self.pair.source.offer(
            handoff_id, ADDRESS, "target-a", handoff_id.hex(), num_tokens, [], blocks
        )
        canceller = asyncio.create_task(self.maybe_cancel(sending.cancel))
        try:
            await sending.granted()
            for end in [*sorted(self.rng.sample(range(num_tokens), num_tokens // 3)), num_tokens]:
                for layer in range(LAYOUT.num_layers):
                    sending.layer_ready(layer, end)
                    await self.nap()
            sending.first(num_tokens, num_tokens * 7)
            await sending.released()
            self.outcomes["released"] += 1
        except HandoffError:
            self.outcomes["not released"] += 1
        finally:
            canceller.cancel()
            await sending.drained()
            await self.source_blocks.give_back(blocks)

    async def target(self, handoff_id: bytes, num_tokens: int) -> None:
        await self.nap()
        landing = self.pair.target.expect(handoff_id, handoff_id.hex())
        canceller = asyncio.create_task(self.maybe_cancel(landing.cancel))
        blocks: list[int] = []
        try:
            offer = await landing.offered()
            assert offer.num_tokens == num_tokens
            if self.rng.random() < 0.05:
                landing.refuse("no")
            landing.wait()
            blocks = await self.target_blocks.take(LAYOUT.num_blocks_for(num_tokens))
            landing.grant(blocks, 0)
            await landing.landed()
            await self.nap()
            assert self.pair.target_memory.read(blocks) == self.written[handoff_id]
            assert (await landing.first()).token_id == num_tokens * 7
            self.outcomes["landed"] += 1
        except HandoffError:
            self.outcomes["not landed"] += 1
        finally:
            canceller.cancel()
            await landing.drained()
            await self.target_blocks.give_back(blocks)

    async def maybe_cancel(self, cancel: Callable[[str], None]) -> None:
        if self.rng.random() < 0.15:
            await asyncio.sleep(self.rng.random() / 10)
            cancel("the client left")

    async def cut_links(self) -> None:
        while True:
            await asyncio.sleep(self.rng.random())
            self.rng.choice(self.pair.network.links).cut()


async def run_storm(seed: int, rate: float, clock: Callable[[], float]) -> Counter[str]:
    rng = random.Random(seed)
    pair = make_pair(Chaos(rng, rate), clock=clock)
    storm = Storm(pair, rng)
    cutter = asyncio.create_task(storm.cut_links())
    async with asyncio.timeout(45):
        await asyncio.gather(*(storm.one() for _ in range(NUM_HANDOFFS)))
    cutter.cancel()
    await storm.source_blocks.take(NUM_SOURCE_BLOCKS)
    await storm.target_blocks.take(NUM_TARGET_BLOCKS)
    await pair.aclose()
    return storm.outcomes


@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 15))]
)
@pytest.mark.parametrize("rate", [0.02, 0.2])
async def test_nothing_hangs_leaks_or_is_overwritten(
    seed: int, rate: float, fast_time: Callable[[], float]
) -> None:
    outcomes = await run_storm(seed, rate, fast_time)
    assert outcomes["released"] + outcomes["not released"] == NUM_HANDOFFS
    assert outcomes["landed"] + outcomes["not landed"] == NUM_HANDOFFS
    assert outcomes["released"] <= outcomes["landed"]
    if rate < 0.1:
        assert outcomes["landed"] > NUM_HANDOFFS / 4
