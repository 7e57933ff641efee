"""A source that waits for room in its ring learns when the connection ends, and loses nothing."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from kvtransfer.errors import LinkLost
from kvtransfer.transports.interface import ControlStream
from kvtransfer.transports.mounted import add_kv_transfer_to_server
from kvtransfer.transports.remote import (
    SERVER_OPTIONS,
    RemoteConnector,
)
from kvtransfer.transports.shared_memory import RING_BYTES
from kvtransfer.wire import hello
from tests.kvtransfer.fakes import LAYOUT

HELLO = hello("source-a", "target-a", "digest", LAYOUT)


class SlowTarget:
    """Answers the Hello, and copies nothing before it is told to."""

    def __init__(self) -> None:
        self.may_copy = asyncio.Event()
        self.copied: list[bytes] = []

    async def serve_control(self, stream: ControlStream) -> None:
        await stream.receive()
        await stream.send(HELLO)
        await stream.receive()

    async def serve_data(
        self, source_instance_id: str, messages: AsyncIterator[bytes | memoryview]
    ) -> None:
        await self.may_copy.wait()
        async for message in messages:
            self.copied.append(bytes(message[:1]))


@pytest.mark.parametrize("end", ["copied", "closed", "killed"])
async def test_a_full_ring(end: str) -> None:
    target, server = SlowTarget(), grpc.aio.server(options=SERVER_OPTIONS)
    add_kv_transfer_to_server(target, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connect = RemoteConnector(transport="shared_memory")
    link = await connect(f"127.0.0.1:{port}", "source-a", "target-a")
    await link.send(HELLO)
    assert await link.receive() is not None and link.transport == "shared_memory"
    reads: list[int] = []

    async def send(number: int) -> None:
        message = bytes([number]) * (RING_BYTES // 4)
        await link.send_data([message], lambda: reads.append(number))

    for number in range(4):
        await send(number)
    waiting = asyncio.create_task(send(4))
    await asyncio.wait([waiting], timeout=0.05)
    assert reads == [0, 1, 2, 3] and not waiting.done()
    if end == "copied":
        target.may_copy.set()
        await asyncio.wait_for(waiting, 5)
        assert reads[-1] == 4 and target.copied[:1] == [b"\0"]
    else:
        await (link.close() if end == "closed" else server.stop(0))
        with pytest.raises(LinkLost):
            await asyncio.wait_for(waiting, 5)
        assert reads == [0, 1, 2, 3]
    await link.close()
    await server.stop(0)
