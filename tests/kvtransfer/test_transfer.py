"""Source and target over the loopback transport, nothing going wrong: every byte, once."""

import asyncio
import random

import pytest

from kvtransfer.handoff.frames import First
from kvtransfer.handoff.table import HandoffState
from kvtransfer.layout import KvLayout
from tests.kvtransfer.fakes import ADDRESS, LAYOUT, Pair, make_pair, mark_all, new_id

BS = LAYOUT.block_size


async def transfer(
    pair: Pair,
    num_tokens: int,
    source_blocks: list[int],
    target_blocks: list[int],
    held: int = 0,
    chunks: list[int] | None = None,
) -> None:
    """One handoff, start to end; returns when both sides are done."""
    handoff_id = new_id()
    landing = pair.target.expect(handoff_id, "r1")
    sending = pair.source.offer(
        handoff_id, ADDRESS, pair.target_id, "r1", num_tokens, [b"h"], source_blocks
    )
    offer = await landing.offered()
    assert (offer.num_tokens, offer.request_id, offer.block_hashes) == (num_tokens, "r1", (b"h",))
    landing.grant(target_blocks, held)
    assert await sending.granted() == held
    for end in chunks or [num_tokens]:
        for layer in range(pair.source.layout.num_layers):
            sending.layer_ready(layer, end)
            await asyncio.sleep(0)
    sending.first(num_tokens, 42)
    assert await landing.first() == First(handoff_id, num_tokens, 42)
    stats = await sending.released()
    await landing.landed()
    await asyncio.gather(sending.drained(), landing.drained())
    layout = pair.source.layout
    missing = layout.num_blocks_for(num_tokens) - layout.num_blocks_for(held)
    assert stats.num_bytes == missing * layout.block_bytes == landing.num_bytes
    assert stats.num_held_tokens == held
    assert 0 <= stats.hidden_ratio <= 1
    if missing:
        assert stats.transfer_s > 0


@pytest.mark.parametrize("num_tokens", [1, BS - 1, BS, BS + 1, 5 * BS - 1, 5 * BS, 5 * BS + 1])
@pytest.mark.parametrize("permuted", [False, True])
async def test_bytes_land_where_granted_and_nowhere_else(num_tokens: int, permuted: bool) -> None:
    pair = make_pair()
    count = LAYOUT.num_blocks_for(num_tokens)
    rng = random.Random(num_tokens)
    source_blocks = rng.sample(range(64), count) if permuted else list(range(3, 3 + count))
    target_blocks = rng.sample(range(64), count) if permuted else list(range(20, 20 + count))
    await transfer(pair, num_tokens, source_blocks, target_blocks)
    assert pair.target_memory.read(target_blocks) == pair.source_memory.read(source_blocks)
    others = sorted(set(range(64)) - set(target_blocks))
    assert not any(any(block) for layer in pair.target_memory.read(others) for block in layer)
    await pair.aclose()
    assert pair.source.stats().outcomes == {"released": 1}
    assert pair.target.stats().outcomes == {"landed": 1}
    assert pair.target.stats().refused_frames == {}


@pytest.mark.parametrize("held", [0, BS, 3 * BS, 4 * BS])
async def test_a_held_prefix_is_not_sent(held: int) -> None:
    pair = make_pair()
    num_tokens = 4 * BS
    source_blocks, target_blocks = [9, 2, 7, 8], [40, 41, 50, 44]
    await transfer(pair, num_tokens, source_blocks, target_blocks, held)
    held_blocks = held // BS
    landed = pair.target_memory.read(target_blocks[held_blocks:])
    assert landed == pair.source_memory.read(source_blocks[held_blocks:])
    prefix = pair.target_memory.read(target_blocks[:held_blocks])
    assert not any(any(block) for layer in prefix for block in layer)
    await pair.aclose()


@pytest.mark.parametrize("chunks", [[1, 2, 3, 17], [4, 8, 17], [5, 17], [16, 17]])
async def test_chunks_are_sent_as_they_get_ready(chunks: list[int]) -> None:
    pair = make_pair()
    source_blocks, target_blocks = [1, 2, 3, 4, 5], [11, 13, 12, 10, 9]
    await transfer(pair, 17, source_blocks, target_blocks, chunks=chunks)
    assert pair.target_memory.read(target_blocks) == pair.source_memory.read(source_blocks)
    await pair.aclose()


async def test_layers_leave_before_the_prompt_is_computed() -> None:
    """Nothing waits for the end: a chunk's layer is at the target while the next computes."""
    pair = make_pair()
    handoff_id = new_id()
    landing = pair.target.expect(handoff_id, "r1")
    sending = pair.source.offer(handoff_id, ADDRESS, pair.target_id, "r1", 8, [], [5, 6])
    await landing.offered()
    landing.grant([1, 2], 0)
    await sending.granted()
    sending.layer_ready(0, 4)
    async with asyncio.timeout(1):
        while landing.num_bytes != LAYOUT.region_bytes:
            await asyncio.sleep(0.001)
    assert pair.target_memory.region(0, 1) == pair.source_memory.region(0, 5)
    assert landing.state is HandoffState.RECEIVING
    mark_all(sending, LAYOUT, 8)
    sending.first(8, 1)
    stats = await sending.released()
    assert stats.num_frames >= 4
    await pair.aclose()


async def test_offer_may_come_before_the_request() -> None:
    pair = make_pair()
    handoff_id = new_id()
    sending = pair.source.offer(handoff_id, ADDRESS, pair.target_id, "r1", 4, [], [5])
    while pair.target.stats().handoffs_active == 0:
        await asyncio.sleep(0)
    landing = pair.target.expect(handoff_id, "r1")
    await landing.offered()
    landing.grant([1], 0)
    await sending.granted()
    mark_all(sending, LAYOUT, 4)
    sending.first(4, 9)
    await asyncio.gather(sending.released(), landing.landed())
    await pair.aclose()


async def test_marks_from_another_thread_wake_the_sender() -> None:
    pair = make_pair(layout=KvLayout("float32", 8, 2, 4, 4))
    handoff_id = new_id()
    landing = pair.target.expect(handoff_id, "r1")
    sending = pair.source.offer(handoff_id, ADDRESS, pair.target_id, "r1", 40, [], range(10))
    await landing.offered()
    landing.grant(range(10, 20), 0)
    await sending.granted()

    def compute() -> None:
        for end in (7, 21, 40):
            mark_all(sending, pair.source.layout, end)

    await asyncio.to_thread(compute)
    sending.first(40, 0)
    await asyncio.gather(sending.released(), landing.landed())
    assert pair.target_memory.read(range(10, 20)) == pair.source_memory.read(range(10))
    await pair.aclose()


async def test_many_handoffs_at_once_keep_apart() -> None:
    pair = make_pair()

    async def one(index: int) -> None:
        blocks = [4 * index + offset for offset in (2, 0, 3, 1)]
        await transfer(pair, 13, blocks, list(reversed(blocks)), chunks=[3, 9, 13])
        assert pair.target_memory.read(blocks[::-1]) == pair.source_memory.read(blocks)

    await asyncio.gather(*(one(index) for index in range(16)))
    assert len(pair.network.links) == 1, "one link for a pair of processes"
    await pair.aclose()
