"""The gRPC transport over real sockets: bytes, mismatches, bad frames, dead and restarted peers."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvtransfer.errors import HandoffFailed
from kvtransfer.handoff.frames import Span
from kvtransfer.layout import KvLayout
from kvtransfer.source import KvSource
from kvtransfer.target import KvTarget
from kvtransfer.transports.mounted import add_kv_transfer_to_server
from kvtransfer.transports.remote import (
    SERVER_OPTIONS,
    RemoteConnector,
)
from kvtransfer.wire import encode_data, hello
from protos import kv_transfer_pb2 as pb
from tests.kvtransfer.fakes import LAYOUT, FakeMemory, make_source, make_target, mark_all, new_id

TOKEN = ("kvrelay-token", "secret")


class TokenRecorder(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Keeps the metadata of every stream by method."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, str]] = {}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        self.seen[details.method] = dict(details.invocation_metadata)
        return await continuation(details)


@asynccontextmanager
async def serving(target: KvTarget, recorder: TokenRecorder | None = None) -> AsyncIterator[str]:
    server = grpc.aio.server(
        options=SERVER_OPTIONS, interceptors=[recorder] if recorder is not None else []
    )
    add_kv_transfer_to_server(target, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await target.aclose()
        await server.stop(0)


async def hand_over(
    source: KvSource, target: KvTarget, address: str, count: int = 4, target_id: str = "target-a"
) -> None:
    handoff_id = new_id()
    num_tokens = count * source.layout.block_size - 1
    landing = target.expect(handoff_id, "r1")
    sending = source.offer(handoff_id, address, target_id, "r1", num_tokens, [], range(count))
    await landing.offered()
    landing.grant(range(count), 0)
    await sending.granted()
    mark_all(sending, source.layout, num_tokens)
    sending.first(num_tokens, 5)
    await asyncio.gather(sending.released(), landing.landed())


async def test_bytes_cross_a_socket_and_the_token_goes_with_both_streams() -> None:
    memory, landed = FakeMemory(), FakeMemory()
    memory.fill()
    target, recorder = make_target(landed), TokenRecorder()
    async with serving(target, recorder) as address:
        source = make_source(memory, RemoteConnector((TOKEN,)))
        await asyncio.gather(*(hand_over(source, target, address) for _ in range(3)))
        assert landed.read(range(4)) == memory.read(range(4))
        await source.aclose()
    for method in ("Control", "Data"):
        metadata = recorder.seen[f"/kvrelay.v1.KvTransfer/{method}"]
        assert metadata["kvrelay-token"] == "secret"
        assert metadata["kvrelay-source"] == "source-a"
        assert metadata["kvrelay-target"] == "target-a"


async def test_frames_of_a_mebibyte_and_larger_regions() -> None:
    for layout in (
        KvLayout("float32", 2, 8, 128, 16),  # 128 KiB a region: several to a frame
        KvLayout("float32", 1, 16, 128, 128),  # 2 MiB a region: one travels alone
    ):
        memory, landed = FakeMemory(layout, 20), FakeMemory(layout, 20)
        memory.fill()
        target = make_target(landed)
        async with serving(target) as address:
            source = make_source(memory, RemoteConnector())
            await hand_over(source, target, address, count=20)
            assert landed.layers == memory.layers
            await source.aclose()


async def test_a_mismatch_is_told_over_the_socket() -> None:
    target = make_target(FakeMemory())
    async with serving(target) as address:
        source = make_source(FakeMemory(), RemoteConnector(), digest="another")
        sending = source.offer(new_id(), address, "target-a", "r1", 4, [], [0])
        with pytest.raises(HandoffFailed, match="the peer refused it: model_digest"):
            await sending.granted()
        with pytest.raises(HandoffFailed, match="target_instance_id"):
            await source.offer(new_id(), address, "target-b", "r1", 4, [], [0]).granted()
        await source.aclose()


async def test_nobody_listens() -> None:
    source = make_source(FakeMemory(), RemoteConnector())
    begin_s = time.monotonic()
    sending = source.offer(new_id(), "127.0.0.1:1", "target-a", "r1", 4, [], [0])
    with pytest.raises(HandoffFailed, match=r"127\.0\.0\.1:1 lost: UNAVAILABLE"):
        await sending.granted()
    await sending.drained()
    assert time.monotonic() - begin_s < 1
    await source.aclose()


class RawPeer:
    """A source that says what it likes."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.metadata = (("kvrelay-source", "raw"), ("kvrelay-target", "target-a"))
        self.control = self.channel.stream_stream(
            "/kvrelay.v1.KvTransfer/Control",
            request_serializer=pb.ControlFrame.SerializeToString,
            response_deserializer=pb.ControlFrame.FromString,
        )(metadata=self.metadata)
        self.data: Any = None

    async def greet(self) -> None:
        await self.control.write(hello("raw", "target-a", "digest", LAYOUT))
        assert (await self.control.read()).WhichOneof("frame") == "hello"
        self.open_data()

    def open_data(self) -> None:
        method = self.channel.stream_unary("/kvrelay.v1.KvTransfer/Data")
        self.data = method(metadata=self.metadata)

    async def close(self) -> None:
        self.control.cancel()
        if self.data is not None:
            self.data.cancel()
        await self.channel.close()


async def test_a_broken_data_stream_is_ended_with_the_reason() -> None:
    target = make_target(FakeMemory())
    async with serving(target) as address:
        peer = RawPeer(address)
        await peer.greet()
        handoff_id = new_id()
        offer = pb.Offer(handoff_id=handoff_id, request_id="r1", num_tokens=4)
        await peer.control.write(pb.ControlFrame(offer=offer))
        landing = target.expect(handoff_id, "r1")
        await landing.offered()
        landing.grant([5], 0)
        await peer.data.write(b"this is no frame, however long it may be: no magic, no version")
        with pytest.raises(HandoffFailed, match="not a data frame"):
            await landing.landed()
        assert await peer.data.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "not a data frame" in await peer.data.details()
        assert (await peer.control.read()).WhichOneof("frame") == "grant"
        assert "not a data frame" in (await peer.control.read()).refuse.reason
        assert await peer.control.read() is grpc.aio.EOF
        await peer.close()


async def test_strange_frames_on_a_good_stream_are_counted_and_harm_nobody() -> None:
    memory, landed = FakeMemory(), FakeMemory()
    memory.fill()
    target = make_target(landed)
    async with serving(target) as address:
        peer = RawPeer(address)
        await peer.greet()
        for handoff_id in (new_id(), new_id()):
            views = [memory.region(0, 60)]
            await peer.data.write(b"".join(encode_data(handoff_id, Span(0, 0, 1), views)))
        source = make_source(memory, RemoteConnector())
        await hand_over(source, target, address)
        assert landed.read(range(4)) == memory.read(range(4))
        assert target.stats().refused_frames == {"unknown": 2}
        await peer.close()
        await source.aclose()


async def test_a_bad_control_frame_ends_the_stream_with_the_reason() -> None:
    target = make_target(FakeMemory())
    async with serving(target) as address:
        peer = RawPeer(address)
        await peer.greet()
        await peer.control.write(pb.ControlFrame(grant=pb.Grant(handoff_id=b"short")))
        assert "handoff id of 5 bytes" in (await peer.control.read()).refuse.reason
        assert await peer.control.read() is grpc.aio.EOF
        await peer.close()


async def test_data_without_control_is_refused() -> None:
    target = make_target(FakeMemory())
    async with serving(target) as address:
        peer = RawPeer(address)
        peer.open_data()
        assert await peer.data.code() is grpc.StatusCode.FAILED_PRECONDITION
        await peer.close()


async def start_peer(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kvtransfer.peer_process", *arguments, stdin=pipe, stdout=pipe
    )


async def says(peer: asyncio.subprocess.Process, word: str) -> str:
    assert peer.stdout is not None
    line = (await asyncio.wait_for(peer.stdout.readline(), 20)).decode().split()
    assert line[0] == word, line
    return line[-1]


def grant_next(peer: asyncio.subprocess.Process, handoff_id: bytes) -> None:
    assert peer.stdin is not None
    peer.stdin.write(f"{handoff_id.hex()}\n".encode())


async def test_a_killed_target_fails_the_handoff_and_the_next_instance_is_used() -> None:
    source = make_source(FakeMemory(), RemoteConnector())
    first = await start_peer("target", "target-1")
    address = f"127.0.0.1:{await says(first, 'port')}"
    handoff_id = new_id()
    grant_next(first, handoff_id)
    sending = source.offer(handoff_id, address, "target-1", "r1", 8, [], [0, 1])
    await sending.granted()
    sending.layer_ready(0, 8)
    await asyncio.sleep(0.05)
    first.kill()
    killed_s = time.monotonic()
    with pytest.raises(HandoffFailed, match="lost"):
        await sending.released()
    await sending.drained()
    assert time.monotonic() - killed_s < 1
    await first.wait()
    second = await start_peer("target", "target-2")
    address = f"127.0.0.1:{await says(second, 'port')}"
    handoff_id = new_id()
    grant_next(second, handoff_id)
    sending = source.offer(handoff_id, address, "target-2", "r1", 8, [], [0, 1])
    await sending.granted()
    mark_all(sending, LAYOUT, 8)
    sending.first(8, 1)
    await sending.released()
    assert await says(second, "landed") == handoff_id.hex()
    second.kill()
    await second.wait()
    await source.aclose()


async def test_a_killed_source_fails_the_handoff_and_the_blocks_are_free() -> None:
    target = make_target(FakeMemory())
    async with serving(target) as address:
        handoff_id = new_id()
        landing = target.expect(handoff_id, "r1")
        peer = await start_peer("source", address, "target-a", handoff_id.hex())
        await landing.offered()
        landing.grant([0, 1], 0)
        await says(peer, "sending")
        while landing.num_bytes < 2 * (LAYOUT.num_layers - 1) * LAYOUT.region_bytes:
            await asyncio.sleep(0.01)
        peer.kill()
        killed_s = time.monotonic()
        with pytest.raises(HandoffFailed, match="lost"):
            await landing.landed()
        await landing.drained()
        assert time.monotonic() - killed_s < 1
        assert target.stats().handoffs_active == 0
        await peer.wait()


@pytest.mark.slow
async def test_a_paused_target_is_given_up_within_the_lease() -> None:
    """A hung process keeps its sockets open: only the lease, or a keepalive, can tell."""
    source = make_source(FakeMemory(), RemoteConnector())
    peer = await start_peer("target", "target-1")
    address = f"127.0.0.1:{await says(peer, 'port')}"
    handoff_id = new_id()
    grant_next(peer, handoff_id)
    sending = source.offer(handoff_id, address, "target-1", "r1", 8, [], [0, 1])
    await sending.granted()
    os.kill(peer.pid, signal.SIGSTOP)
    paused_s = time.monotonic()
    with pytest.raises(HandoffFailed):
        await sending.released()
    await sending.drained()
    assert time.monotonic() - paused_s < 7
    peer.kill()
    await peer.wait()
    await source.aclose()
