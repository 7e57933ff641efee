"""Handoffs over a transport that loses, doubles, damages and cuts, and sides that give up."""

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest

from kvtransfer.errors import HandoffCancelled, HandoffError, HandoffFailed, HandoffRefused
from kvtransfer.transports.interface import Link
from tests.kvtransfer.driven import PHASES, TOKENS, Run, Script, up_to
from tests.kvtransfer.fakes import LAYOUT, make_pair, mark_all


@pytest.mark.parametrize("lost", ["landed", "grant", "offer", "first", "sent"])
async def test_a_lost_control_frame_heals(lost: str, fast_time: Callable[[], float]) -> None:
    faults = Script(drop=[lost])
    pair = make_pair(faults, clock=fast_time)
    run = Run(pair)
    await run.grant()
    run.send_all()
    await run.succeed()
    assert (await run.landing.first()).token_id == 1
    assert faults.drop == [], "it was lost"
    await pair.aclose()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_cancel_at_any_time_ends_both_at_once(phase: str, side: str) -> None:
    pair = make_pair()
    run = Run(pair)
    await up_to(run, phase)
    begin_s = time.monotonic()
    (run.sending if side == "source" else run.landing).cancel("the client left")
    reasons = await run.fail(HandoffCancelled, HandoffCancelled)
    assert all("the client left" in reason for reason in reasons)
    assert time.monotonic() - begin_s < 0.5
    again = Run(pair)
    await again.grant()
    again.send_all()
    await again.succeed()
    await pair.aclose()


async def test_a_lost_cancel_heals(fast_time: Callable[[], float]) -> None:
    pair = make_pair(Script(drop=["cancel", "cancelled"]), clock=fast_time)
    run = Run(pair)
    await run.grant()
    run.landing.cancel("the client left")
    reasons = await run.fail(HandoffCancelled, HandoffCancelled)
    assert reasons == ["cancelled by the target: the client left", "the client left"]
    await pair.aclose()


@pytest.mark.parametrize("phase", PHASES[1:])
async def test_a_cut_connection_fails_both_at_once_and_the_next_offer_dials_anew(
    phase: str,
) -> None:
    pair = make_pair()
    run, bystander = Run(pair), Run(pair, [40, 41, 42])
    await up_to(run, phase)
    await bystander.landing.offered()
    begin_s = time.monotonic()
    pair.network.links[0].cut()
    reasons = await run.fail(HandoffFailed, HandoffFailed)
    await bystander.fail(HandoffFailed, HandoffFailed)
    assert all("lost" in reason for reason in reasons)
    assert time.monotonic() - begin_s < 0.5
    again = Run(pair)
    await again.grant()
    again.send_all()
    await again.succeed()
    assert len(pair.network.links) == 2
    await pair.aclose()


async def test_a_refusal_reaches_the_source() -> None:
    pair = make_pair()
    run = Run(pair)
    await run.landing.offered()
    run.landing.wait()
    run.landing.refuse("the prompt can never fit")
    with pytest.raises(HandoffRefused, match="the prompt can never fit"):
        await run.sending.granted()
    reasons = await run.fail(HandoffRefused, HandoffRefused)
    assert reasons == ["the prompt can never fit"] * 2
    await pair.aclose()


async def test_a_damaged_frame_fails_its_handoff_alone() -> None:
    damage = [True]

    def on_data(message: bytes) -> Sequence[bytes]:
        if damage and damage.pop():
            return (message[:-1] + bytes([message[-1] ^ 1]),)
        return (message,)

    pair = make_pair(Script(on_data=on_data))
    run, bystander = Run(pair), Run(pair, [40, 41, 42])
    await run.grant()
    await bystander.grant()
    mark_all(run.sending, LAYOUT, TOKENS)
    _, reason = await run.fail(HandoffCancelled, HandoffFailed)
    assert reason == "a data frame came damaged"
    bystander.send_all()
    await bystander.succeed()
    assert pair.target.stats().refused_frames["damaged"] == 1
    await pair.aclose()


async def test_doubled_frames_count_once() -> None:
    pair = make_pair(Script(on_data=lambda message: (message, message)))
    run = Run(pair)
    await run.grant()
    run.send_all()
    await run.succeed()
    assert run.landing.num_bytes == 3 * LAYOUT.block_bytes
    refused = pair.target.stats().refused_frames
    assert refused["duplicate"] + refused.get("late", 0) == 3
    await pair.aclose()


async def test_lost_bytes_end_in_failure_not_in_waiting(fast_time: Callable[[], float]) -> None:
    pair = make_pair(Script(on_data=lambda message: ()), clock=fast_time)
    run = Run(pair)
    await run.grant()
    run.send_all()
    _, reason = await run.fail(HandoffCancelled, HandoffFailed)
    assert reason == "bytes are missing and none came for 5 s"
    await pair.aclose()


async def test_a_message_that_is_no_frame_breaks_the_stream() -> None:
    noise = [True]

    def on_data(message: bytes) -> Sequence[bytes]:
        return (b"noise",) if noise and noise.pop() else (message,)

    pair = make_pair(Script(on_data=on_data))
    run = Run(pair)
    await run.grant()
    mark_all(run.sending, LAYOUT, TOKENS)
    reasons = await run.fail(HandoffFailed, HandoffFailed)
    assert all("shorter than its header" in reason for reason in reasons)
    again = Run(pair)
    await again.grant()
    again.send_all()
    await again.succeed()
    await pair.aclose()


@pytest.mark.parametrize("side", ["source", "target"])
async def test_memory_that_cannot_be_used_fails_the_handoff_alone(
    side: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair()
    run, bystander = Run(pair), Run(pair, [40, 41, 42])
    await run.grant()
    await bystander.grant()

    def broken(*_: object) -> memoryview:
        raise ValueError("no such block")

    with monkeypatch.context() as patch:
        patch.setattr(
            pair.source_memory if side == "source" else pair.target_memory, "region", broken
        )
        run.send_all()
        reasons = await run.fail(HandoffError, HandoffError)
    assert all(f"the {side} could not" in reason for reason in reasons)
    assert "no such block" in caplog.text
    bystander.send_all()
    await bystander.succeed()
    await pair.aclose()


async def test_a_cancelled_source_holds_its_blocks_until_they_are_read() -> None:
    """A transport may read late; only then is the handoff drained."""
    pair = make_pair()
    reading: list[Callable[[], None]] = []
    connect = pair.network.connect

    async def slow_connect(address: str, source_id: str, target_id: str) -> Link:
        link = await connect(address, source_id, target_id)

        async def send_data(_: object, on_read: Callable[[], None]) -> None:
            reading.append(on_read)
            await asyncio.Event().wait()

        link.send_data = send_data  # type: ignore[method-assign,assignment]
        return link

    pair.source._connect = slow_connect
    run = Run(pair)
    await run.grant()
    run.send_all()
    while not reading:
        await asyncio.sleep(0)
    run.sending.cancel("the client left")
    with pytest.raises(HandoffCancelled):
        await run.sending.released()
    draining = asyncio.create_task(run.sending.drained())
    await asyncio.sleep(0.02)
    assert not draining.done()
    reading[0]()
    await asyncio.wait_for(draining, 1)
    await pair.aclose()
