"""What every transport must do, faults included: one suite, run over each of them."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from kvtransfer.errors import HandoffCancelled, HandoffFailed, HandoffRefused
from kvtransfer.handoff.frames import Span
from kvtransfer.layout import KvLayout
from kvtransfer.transports import shared_memory
from kvtransfer.transports.remote import RemoteConnector
from kvtransfer.wire import encode_data
from tests.kvtransfer.fakes import LAYOUT, FakeMemory, make_source, mark_all, new_id
from tests.kvtransfer.rig import TRANSPORTS, Rig, rig

PROCESSES = ["grpc", "shared_memory"]


@pytest.fixture(params=TRANSPORTS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with rig(request.param) as made:
        yield made


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 17, 64])
async def test_every_byte_lands_where_it_was_granted(pair: Rig, num_blocks: int) -> None:
    await pair.hand_over_any(num_blocks, num_blocks)


async def test_many_at_once_keep_apart_on_one_link(pair: Rig) -> None:
    async def one(index: int) -> None:
        blocks = [4 * index + offset for offset in (2, 0, 3, 1)]
        await pair.hand_over(blocks, blocks[::-1], [3, 9, 13])

    await asyncio.gather(*(one(index) for index in range(16)))
    for index in range(16):
        blocks = [4 * index + offset for offset in (2, 0, 3, 1)]
        assert pair.landed.read(blocks[::-1]) == pair.sent.read(blocks)
    assert len(pair.links) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_regions_of_any_size_and_more_bytes_than_are_under_way_at_once(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory.Ring.__init__, "__defaults__", (1 << 20,))
    for layout in (
        KvLayout("float32", 3, 2, 64, 8),  # 8 KiB a region: frames wrap around
        KvLayout("float32", 2, 8, 64, 128),  # 512 KiB a region: no slot is so large
    ):
        async with rig(transport, layout, 40) as pair:
            for seed in range(6):
                await pair.hand_over_any(seed, 20 + seed)


async def test_a_full_target_makes_the_source_wait(pair: Rig) -> None:
    sending, landing = await pair.offered()
    landing.wait()
    mark_all(sending, LAYOUT, 8)
    await pair.hand_over_any(1, 3)
    assert landing.num_bytes == 0, "nothing is sent that was not granted"
    landing.grant([62, 63], 0)
    sending.first(8, 1)
    await asyncio.gather(sending.released(), landing.landed())
    assert pair.landed.read([62, 63]) == pair.sent.read([0, 1])


async def test_a_refusal_is_told(pair: Rig) -> None:
    sending, landing = await pair.offered()
    landing.refuse("too long")
    with pytest.raises(HandoffRefused, match="too long"):
        await sending.granted()


@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_cancel_in_the_middle_ends_both_and_the_blocks_serve_again(
    pair: Rig, side: str
) -> None:
    sending, landing = await pair.granted()
    sending.layer_ready(0, 8)
    (sending if side == "source" else landing).cancel("the client left")
    for end in (sending.released(), landing.landed()):
        with pytest.raises(HandoffCancelled, match="the client left"):
            await end
    await asyncio.gather(sending.drained(), landing.drained())
    await pair.hand_over([7, 8], [5, 6], [8])
    assert pair.landed.read([5, 6]) == pair.sent.read([7, 8])


async def test_a_cut_connection_fails_both_and_the_next_offer_dials_anew(pair: Rig) -> None:
    for _ in range(3):
        sending, landing = await pair.granted()
        sending.layer_ready(0, 8)
        await pair.cut()
        for end in (sending.released(), landing.landed()):
            with pytest.raises(HandoffFailed, match="lost"):
                await asyncio.wait_for(end, 2)
        await asyncio.wait_for(asyncio.gather(sending.drained(), landing.drained()), 2)
        await pair.hand_over_any(3, 9)


async def test_doubled_late_and_foreign_frames_are_counted_and_harm_nobody(pair: Rig) -> None:
    sending, landing = await pair.granted()
    mark_all(sending, LAYOUT, 8)
    while landing.num_bytes < 2 * LAYOUT.block_bytes:
        await asyncio.sleep(0.001)

    async def say(to: bytes) -> None:
        views = [pair.sent.region(0, 40)]
        frame = encode_data(to, Span(0, 0, 1), views, pair.links[0].is_bare)
        await pair.links[0].send_data(frame, lambda: None)

    await say(sending.handoff_id)
    await say(new_id())
    sending.first(8, 1)
    await asyncio.gather(sending.released(), landing.landed())
    await say(sending.handoff_id)
    await pair.hand_over([9], [10], [4])
    while sum(pair.target.stats().refused_frames.values()) < 3:
        await asyncio.sleep(0.001)
    assert set(pair.target.stats().refused_frames) <= {"duplicate", "unknown", "late", "unexpected"}
    assert pair.landed.read([5, 6]) == pair.sent.read([0, 1])


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kvtransfer.peer_process", *arguments, stdin=pipe, stdout=pipe
    )


@pytest.mark.parametrize("transport", PROCESSES)
@pytest.mark.parametrize(
    "fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
async def test_a_killed_or_paused_target_is_given_up(transport: str, fault: signal.Signals) -> None:
    source = make_source(FakeMemory(), RemoteConnector(transport=transport))
    peer = await _start("target", "target-1")
    assert peer.stdin is not None and peer.stdout is not None
    port = (await asyncio.wait_for(peer.stdout.readline(), 20)).decode().split()[-1]
    handoff_id = new_id()
    peer.stdin.write(f"{handoff_id.hex()}\n".encode())
    sending = source.offer(handoff_id, f"127.0.0.1:{port}", "target-1", "r1", 8, [], [0, 1])
    await sending.granted()
    os.kill(peer.pid, fault)
    sending.layer_ready(0, 8)
    with pytest.raises(HandoffFailed):
        await asyncio.wait_for(sending.released(), 8)
    await asyncio.wait_for(sending.drained(), 8)
    if fault is not signal.SIGKILL:
        peer.kill()
    await peer.wait()
    await source.aclose()


@pytest.mark.parametrize("transport", PROCESSES)
async def test_a_killed_source_leaves_nothing_behind(transport: str) -> None:
    async with rig(transport) as pair:
        handoff_id = new_id()
        landing = pair.target.expect(handoff_id, "r1")
        peer = await _start("source", pair.address, "target-a", handoff_id.hex(), transport)
        await landing.offered()
        landing.grant([0, 1], 0)
        while landing.num_bytes < 2 * (LAYOUT.num_layers - 1) * LAYOUT.region_bytes:
            await asyncio.sleep(0.01)
        peer.kill()
        with pytest.raises(HandoffFailed, match="lost"):
            await asyncio.wait_for(landing.landed(), 2)
        await asyncio.wait_for(landing.drained(), 2)
        await peer.wait()
        await pair.hand_over([7, 8], [0, 1], [8])
        assert pair.landed.read([0, 1]) == pair.sent.read([7, 8])
