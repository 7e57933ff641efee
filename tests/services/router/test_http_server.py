"""The HTTP port by itself: bodies, disconnects, sockets."""

import asyncio
import socket
import sys
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from services.router.http_server import (
    PEER_TIMEOUT_MS,
    HttpServer,
    read_body,
    until_disconnect,
)
from services.runtime.errors import Aborted, InvalidArgument


class _Receive:
    """An ASGI ``receive`` whose messages a test puts in."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for message in messages:
            self.queue.put_nowait(message)

    async def __call__(self) -> dict[str, Any]:
        return await self.queue.get()


async def test_work_ends_with_its_result_or_its_error() -> None:
    async def work(result: int) -> int:
        await asyncio.sleep(0)
        return 1 // result

    assert await until_disconnect(_Receive(), work(1)) == 1
    with pytest.raises(ZeroDivisionError):
        await until_disconnect(_Receive(), work(0))


@pytest.mark.parametrize("leaves", ["client", "caller"])
async def test_work_is_cancelled_and_awaited(leaves: str) -> None:
    diary: list[str] = []

    async def work() -> None:
        diary.append("started")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            diary.append("cleaned up")

    receive = _Receive()
    running = asyncio.create_task(until_disconnect(receive, work()))
    await asyncio.sleep(0.01)
    if leaves == "client":
        receive.queue.put_nowait({"type": "http.disconnect"})
        with pytest.raises(Aborted):
            await running
    else:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert diary == ["started", "cleaned up"]


async def test_a_body_that_stops_coming_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.http_server.BODY_TIMEOUT_S", 0.05)
    first = {"type": "http.request", "body": b"half", "more_body": True}
    request = Request({"type": "http", "headers": []}, _Receive(first))
    with pytest.raises(InvalidArgument, match="stopped coming"):
        await read_body(request)


async def test_a_head_that_does_not_come_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.router.http_server.HEAD_TIMEOUT_S", 0.3)
    whole = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    server = HttpServer(PlainTextResponse("here"), "127.0.0.1", 0)
    await server.start()
    try:
        for beginning in (b"", whole[:10], whole + whole[:10]):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(beginning)
            for byte in (b"a", b"b") if beginning else ():  # trickling does not help
                await asyncio.sleep(0.1)
                writer.write(byte)
            answers = await asyncio.wait_for(reader.read(), 2)
            assert answers.count(b"here") == beginning.count(whole)
            writer.close()
    finally:
        await server.stop()


async def test_a_slow_answer_outlives_the_wait_for_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.http_server.HEAD_TIMEOUT_S", 0.05)

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.3)
        await PlainTextResponse("here")(scope, receive, send)

    server = HttpServer(slow, "127.0.0.1", 0)
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 2)).endswith(b"here")
        writer.close()
    finally:
        await server.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems name these options otherwise")
async def test_vanished_peers_are_noticed() -> None:
    server = HttpServer(PlainTextResponse("here"), "127.0.0.1", 0)
    await server.start()
    assert server._server is not None
    (listener,) = server._server.servers[0].sockets
    tcp = socket.IPPROTO_TCP
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert listener.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == PEER_TIMEOUT_MS
    probes_s = listener.getsockopt(tcp, socket.TCP_KEEPINTVL) * listener.getsockopt(
        tcp, socket.TCP_KEEPCNT
    )
    assert listener.getsockopt(tcp, socket.TCP_KEEPIDLE) + probes_s == 11
    await server.stop()
