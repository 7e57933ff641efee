"""The gRPC transport over real sockets: bytes, mismatches, bad frames, dead and restarted peers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvtransfer.layout import KvLayout
from kvtransfer.source import KvSource
from kvtransfer.target import KvTarget
from kvtransfer.transports.remote import (
    SERVER_OPTIONS,
    RemoteConnector,
    add_kv_transfer_to_server,
)
from tests.kvtransfer.fakes import FakeMemory, make_source, make_target, mark_all, new_id

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
