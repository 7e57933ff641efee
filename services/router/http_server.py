"""uvicorn inside the router's event loop: our sockets, our signals, our shutdown.

Also what both ends of a response need: a body read with a limit, work that ends when the client
goes. Knows nothing of what is served. Used by ``app`` and ``openai_api``.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.runtime.address import check_bind, join_address, numeric_host
from services.runtime.certificates import NO_TLS, TlsFiles
from services.runtime.errors import Aborted, InvalidArgument, Unavailable
from services.runtime.lifecycle import Component
from services.runtime.server import PUBLIC_MESSAGE_BYTES
from services.runtime.tls import HttpTls

BODY_TIMEOUT_S = 10.0
"""A body that does not move for so long is given up."""
HEAD_TIMEOUT_S = 10.0
"""A request's head that is not whole for so long ends its connection."""
PEER_TIMEOUT_MS = 10_000
"""Sent bytes that nobody acknowledges for so long end a connection."""
_START_TURN_S = 0.005
_ROTATE_S = 5.0

Result = TypeVar("Result")


class _Server(uvicorn.Server):
    """Signals belong to the process, not to one of its servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """Ends a connection that brings no whole request; uvicorn would hold it for ever."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._stop_waiting()
        elif self._waiting is None:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._waiting = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _stop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()

    def _give_up(self) -> None:
        self._waiting = None
        if not self._is_answering:
            self.transport.close()


class HttpServer(Component):
    """One HTTP port. ``port`` and ``address`` are real once it has started."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        insecure: bool = False,
        tls: TlsFiles = NO_TLS,
    ) -> None:
        self._tls = tls
        self._app = app
        self._host = numeric_host(host)
        self.port = port
        self._insecure = insecure
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return join_address(self._host, self.port)

    async def start(self) -> None:
        """Raises: InvalidArgument: public host without insecure. Unavailable: the port is taken."""
        check_bind(self._host, self._insecure or self._tls.is_on)
        listener = self._bind()
        config = uvicorn.Config(
            self._app,
            http=_Protocol,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=1,
        )
        if self._tls.is_on:
            self._guard(config)
        self._server = _Server(config)
        self._serving = asyncio.create_task(
            self._server.serve(sockets=[listener]), name="http-server"
        )
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(_START_TURN_S)
        if self._serving.done():
            self._serving.result()
            raise Unavailable(f"the HTTP server at {self.address} did not start")

    async def watch(self) -> None:
        assert self._serving is not None
        await asyncio.shield(self._serving)

    async def stop(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
        server, self._server = self._server, None
        if server is not None and self._serving is not None:
            server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)

    def _guard(self, config: uvicorn.Config) -> None:
        """Speak TLS; changed certificates are read again now and then."""
        tls = HttpTls(self._tls)
        config.load()
        config.ssl = tls.context

        async def refresh() -> None:
            while True:
                await asyncio.sleep(_ROTATE_S)
                tls.refresh()

        self._refreshing = asyncio.create_task(refresh(), name="http-certificates")

    def _bind(self) -> socket.socket:
        host = self._host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With its protocol named: else asyncio leaves Nagle's algorithm on, 40 ms an answer.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _notice_vanished_peers(listener)
            listener.bind((host, self.port))
        except OSError as error:
            listener.close()
            reason = (error.strerror or str(error)).lower()
            raise Unavailable(f"cannot bind {self.address}: {reason}") from error
        self.port = listener.getsockname()[1]
        return listener


def _notice_vanished_peers(listener: socket.socket) -> None:
    """Connections inherit these: a peer that lost its power or network is gone within 11 s."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_TIMEOUT_MS)


async def read_body(request: Request, limit: int = PUBLIC_MESSAGE_BYTES) -> bytes:
    """The whole body.

    Raises:
        InvalidArgument: it is larger than ``limit``, or stops coming.
        ClientDisconnect: the client went away meanwhile.
    """
    body = bytearray()
    chunks = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return bytes(body)
        except TimeoutError:
            raise InvalidArgument("", f"the body stopped coming for {BODY_TIMEOUT_S:g} s") from None
        body += chunk
        if len(body) > limit:
            raise InvalidArgument("", f"the body is larger than {limit} bytes")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, which is cancelled when the client goes. The body was read before.

    Raises:
        Aborted: the client has gone.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Aborted("the client has gone")
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events; the generator is closed at once when the client goes."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        )
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            with contextlib.suppress(Aborted):
                await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
