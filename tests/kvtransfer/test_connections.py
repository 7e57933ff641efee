"""Who may talk to whom: mismatches, restarts, silence, shutting down."""

import pytest

from kvtransfer.errors import HandoffCancelled, HandoffFailed, KvTransferError, LinkLost
from kvtransfer.transports.interface import ControlStream
from tests.kvtransfer.driven import SOURCE_BLOCKS, TOKENS, Run
from tests.kvtransfer.fakes import (
    ADDRESS,
    LAYOUT,
    FakeMemory,
    make_pair,
    make_source,
    make_target,
    new_id,
)


@pytest.mark.parametrize("difference", ["digest", "layout", "instance"])
async def test_a_mismatch_is_refused_with_the_reason_and_not_remembered(difference: str) -> None:
    pair = make_pair()
    memory = pair.source_memory
    target_id = "target-of-before" if difference == "instance" else "target-a"
    if difference == "layout":
        other = type(LAYOUT)("float32", 3, 2, 4, 8)
        memory = FakeMemory(other)
    digest = "another" if difference == "digest" else "digest"
    stranger = make_source(memory, pair.network.connect, "source-b", digest)
    pair.extra.append(stranger)
    sending = stranger.offer(new_id(), ADDRESS, target_id, "r1", TOKENS, [], SOURCE_BLOCKS)
    names = {"digest": "model_digest", "layout": "block_size", "instance": "target_instance_id"}
    with pytest.raises(HandoffFailed, match=names[difference]):
        await sending.granted()
    await sending.drained()
    again = Run(pair)
    await again.grant()
    again.send_all()
    await again.succeed()
    await pair.aclose()


async def test_a_restarted_target_behind_the_same_address_is_used() -> None:
    pair = make_pair()
    run = Run(pair)
    await run.grant()
    pair.network.links[0].cut()
    await run.fail(HandoffFailed, HandoffFailed)
    await pair.target.aclose()
    pair.target = make_target(pair.target_memory, "target-b")
    pair.network.targets[ADDRESS] = pair.target
    stale = pair.source.offer(new_id(), ADDRESS, "target-a", "r1", TOKENS, [], SOURCE_BLOCKS)
    with pytest.raises(HandoffFailed, match="target_instance_id"):
        await stale.granted()
    pair.target_id = "target-b"
    again = Run(pair)
    await again.grant()
    again.send_all()
    await again.succeed()
    await pair.aclose()


async def test_nobody_listens() -> None:
    pair = make_pair()
    sending = pair.source.offer(new_id(), "nowhere:1", "t", "r1", TOKENS, [], SOURCE_BLOCKS)
    with pytest.raises(HandoffFailed, match="nobody listens at nowhere:1"):
        await sending.granted()
    await pair.aclose()


async def test_a_silent_target_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        async def serve_control(self, stream: ControlStream) -> None:
            while await stream.receive() is not None:
                pass

    monkeypatch.setattr("kvtransfer.handshake.HELLO_S", 0.05)
    pair = make_pair()
    pair.network.targets["silent:1"] = Silent()  # type: ignore[assignment]
    sending = pair.source.offer(new_id(), "silent:1", "t", "r1", TOKENS, [], SOURCE_BLOCKS)
    with pytest.raises(HandoffFailed, match="no answer within"):
        await sending.granted()
    await pair.aclose()


async def test_a_source_that_connects_anew_replaces_its_old_connection() -> None:
    pair = make_pair()
    run = Run(pair)
    await run.grant()
    twin = make_source(pair.source_memory, pair.network.connect, "source-a")
    pair.extra.append(twin)
    handoff_id = new_id()
    landing = pair.target.expect(handoff_id, "r2")
    twin.offer(handoff_id, ADDRESS, "target-a", "r2", TOKENS, [], SOURCE_BLOCKS)
    await landing.offered()
    _, reason = await run.fail(HandoffFailed, HandoffFailed)
    assert "connected anew" in reason
    await pair.aclose()


async def test_data_without_control_is_refused() -> None:
    async def nothing() -> object:
        yield b""

    target = make_target(FakeMemory())
    with pytest.raises(LinkLost):
        await target.serve_data("stranger", nothing())  # type: ignore[arg-type]


async def test_closing_ends_what_runs_and_takes_no_more() -> None:
    pair = make_pair()
    run = Run(pair)
    await run.grant()
    await pair.source.aclose()
    reasons = await run.fail(HandoffCancelled, HandoffCancelled)
    assert all("the source shuts down" in reason for reason in reasons)
    with pytest.raises(KvTransferError, match="shut down"):
        Run(pair)
    await pair.aclose()
    await pair.aclose()
    with pytest.raises(KvTransferError, match="shut down"):
        pair.target.expect(new_id(), "r1")
