"""The locks of both public faces: no key, no work.

Health, readiness, reflection and metrics answer everybody who can reach the port; they tell
nothing of anybody's prompts. Everything else wants a key where there is a keyring. Mounted by
``app`` around services that know nothing of keys.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.keys import Gate, Key, Keyring
from services.router.openai_answers import error_object
from services.runtime.errors import ResourceExhausted, ServiceError
from services.runtime.server import OUR_METHODS

OPEN_PATHS = ("/health", "/ready", "/metrics")


class GrpcDoor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wants ``authorization: Bearer KEY`` of every call to our own methods."""

    def __init__(self, keyring: Keyring, gate: Gate) -> None:
        self._keyring = keyring
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(OUR_METHODS):
            return handler
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        try:
            key = self._keyring.check(given if isinstance(given, str) else "")
        except ServiceError as error:
            return grpc.stream_stream_rpc_method_handler(_refusing(error))
        return self._counted(handler, key)

    def _counted(self, handler: grpc.RpcMethodHandler, key: Key) -> grpc.RpcMethodHandler:
        if not handler.response_streaming:
            return handler

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                with self._gate.enter(key):
                    async for answer in handler.unary_stream(request, context):
                        yield answer
            except ResourceExhausted as error:
                retry_ms = str(int(error.retry_after_s * 1000))
                await context.abort(error.codes.grpc, str(error), (("retry-after-ms", retry_ms),))

        return grpc.unary_stream_rpc_method_handler(
            stream, handler.request_deserializer, handler.response_serializer
        )


def _refusing(error: ServiceError) -> Callable[[Any, Any], Awaitable[None]]:
    # A stream handler answers at once, whatever kind of call it was; others wait for input.
    async def refuse(_requests: object, context: Any) -> None:
        await context.abort(error.codes.grpc, str(error))

    return refuse


class HttpDoor:
    """Wants ``Authorization: Bearer KEY`` of every request but the open ones."""

    def __init__(self, app: ASGIApp, keyring: Keyring, gate: Gate) -> None:
        self._app = app
        self._keyring = keyring
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        try:
            key = self._keyring.check(given)
            with self._gate.enter(key):
                await self._app(scope, receive, send)
        except ServiceError as error:
            headers = {"www-authenticate": "Bearer"}
            if isinstance(error, ResourceExhausted):
                headers = {"retry-after": str(round(error.retry_after_s))}
            response = JSONResponse(error_object(error), error.codes.http, headers)
            await response(scope, receive, send)
