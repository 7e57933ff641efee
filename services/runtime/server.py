"""gRPC servers and the channels between services: addresses, options, the cluster token.

A server binds to loopback unless told otherwise. Internal services (everything but the router's
public port) ask every call for the cluster token; only their health service answers without.
Knows no service by name. Used by the router and by workers; both ends of an internal call get
their options here, because keepalive works only when client and server agree.
"""

import asyncio
import contextlib
import hmac
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from services.runtime.address import check_bind, join_address, numeric_host
from services.runtime.certificates import NO_TLS, TlsFiles
from services.runtime.errors import FailedPrecondition, Unavailable
from services.runtime.lifecycle import Component
from services.runtime.tls import channel_credentials, channel_name, server_credentials

TOKEN_VARIABLE = "KVRELAY_CLUSTER_TOKEN"
TOKEN_KEY = "kvrelay-token"
HEALTH_PREFIX = "/grpc.health.v1.Health/"
OUR_METHODS = "/kvrelay.v1."

PUBLIC_MESSAGE_BYTES = 8 * 1024 * 1024
"""Largest message a client may send."""
INTERNAL_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message between services."""

KEEPALIVE_TIME_MS = 5_000
KEEPALIVE_TIMEOUT_MS = 4_000

Options = Sequence[tuple[str, Any]]
_KEEPALIVE: Options = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


def server_options(max_message_bytes: int) -> Options:
    """A taken port is an error, our clients may ping, vanished peers are noticed."""
    return (
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        *_KEEPALIVE,
    )


def channel_options() -> Options:
    """A connection of its own for each channel; a dead peer is noticed within 9 s."""
    return (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_http_proxy", 0),
        *_KEEPALIVE,
    )


def cluster_token() -> str:
    """The secret that the services of one cluster share.

    Raises:
        FailedPrecondition: the environment holds none.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise FailedPrecondition(
            f"{TOKEN_VARIABLE} is not set: give the router and every worker the same secret"
        )
    return token


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata that opens an internal service: ``stub.Call(request, metadata=…)``."""
    return ((TOKEN_KEY, token),)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets a call pass that carries the cluster token; health checks need none."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        # A stream handler answers at once, whatever kind of call it was; others wait for input.
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if handler_call_details.method.startswith(HEALTH_PREFIX):
            return await continuation(handler_call_details)
        for key, value in handler_call_details.invocation_metadata:
            given = value if isinstance(value, bytes) else value.encode()
            if key == TOKEN_KEY and hmac.compare_digest(given, self._token):
                return await continuation(handler_call_details)
        return self._refusal


@dataclass(frozen=True, slots=True)
class _Malformed:
    """In the place of a message that could not be parsed."""

    kind: str


class ParseInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """A message that cannot be parsed is the client's fault; gRPC itself would call it INTERNAL.

    For our own public methods: one message in, and streams out are generators.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(OUR_METHODS):
            return handler
        assert not handler.request_streaming
        parse, kind = handler.request_deserializer, handler_call_details.method

        def forgiving(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError:
                return _Malformed(kind)

        if handler.response_streaming:

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                await _check_parsed(request, context)
                async with contextlib.aclosing(handler.unary_stream(request, context)) as answers:
                    async for answer in answers:
                        yield answer

            return grpc.unary_stream_rpc_method_handler(
                stream, forgiving, handler.response_serializer
            )

        async def unary(request: Any, context: Any) -> Any:
            await _check_parsed(request, context)
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(unary, forgiving, handler.response_serializer)


async def _check_parsed(request: Any, context: Any) -> None:
    if isinstance(request, _Malformed):
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{request.kind}: not a message of this method, or a text in it is not UTF-8",
        )


async def _refuse(_requests: object, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        f"this service needs the cluster token: set the same {TOKEN_VARIABLE} on every service",
    )


class GrpcServer(Component):
    """One gRPC port. ``port`` and ``address`` are real once it has started.

    Args:
        mount: adds the services.
        host: address to bind.
        port: 0 is any free one.
        token: the cluster token of an internal port; None on the public one.
        insecure: the host may be one that others can reach.
        stop_grace_s: running calls may end by themselves for so long.
        tls: what it shows; with ``ca`` it wants to see as much.
        doors: interceptors that calls pass first.
    """

    def __init__(
        self,
        mount: Callable[[grpc.aio.Server], None],
        host: str,
        port: int,
        *,
        token: str | None = None,
        insecure: bool = False,
        stop_grace_s: float = 0.2,
        tls: TlsFiles = NO_TLS,
        doors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self._mount = mount
        self._host = numeric_host(host)
        self.port = port
        self._token = token
        self._insecure = insecure
        self._stop_grace_s = stop_grace_s
        self._tls = tls
        self._doors = tuple(doors)
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return join_address(self._host, self.port)

    async def start(self) -> None:
        """Raises: InvalidArgument: public host without insecure. Unavailable: the port is taken."""
        check_bind(self._host, self._insecure or self._tls.is_on)
        if self.port:
            self._check_free()
        internal = self._token is not None
        interceptors = [
            *self._doors,
            TokenInterceptor(self._token) if self._token is not None else ParseInterceptor(),
        ]
        limit = INTERNAL_MESSAGE_BYTES if internal else PUBLIC_MESSAGE_BYTES
        server = grpc.aio.server(interceptors=interceptors, options=server_options(limit))
        self._mount(server)
        try:
            credentials = server_credentials(self._tls)
            if credentials is None:
                port = server.add_insecure_port(self.address)
            else:
                port = server.add_secure_port(self.address, credentials)
        except RuntimeError as error:
            raise Unavailable(f"cannot bind {self.address}: choose another port, or 0") from error
        self._server = server
        self.port = port
        await server.start()

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(self._stop_grace_s)

    def _check_free(self) -> None:
        """gRPC would log why it cannot bind, lines of it, and not tell us."""
        host = self._host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, self.port))
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise Unavailable(f"cannot bind {self.address}: {reason}") from error


def open_channel(address: str, tls: TlsFiles = NO_TLS) -> grpc.aio.Channel:
    """A channel to an internal service; it connects by itself. Calls need ``token_metadata``."""
    credentials = channel_credentials(tls)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=channel_options())
    options = (*channel_options(), *channel_name(tls))
    return grpc.aio.secure_channel(address, credentials, options=options)


async def connect(address: str, timeout_s: float = 5.0, tls: TlsFiles = NO_TLS) -> grpc.aio.Channel:
    """A connected channel to an internal service.

    Raises:
        Unavailable: nobody answers at ``address`` within ``timeout_s``.
    """
    channel = open_channel(address, tls)
    try:
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
    except TimeoutError:
        await channel.close()
        raise Unavailable(f"nobody answers at {address} (waited {timeout_s:g} s)") from None
    except BaseException:
        await channel.close()
        raise
    return channel
