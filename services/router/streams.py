"""A bidirectional stream to an instance, as a link needs it, and the gRPC one.

Knows nothing of requests. Dialled by ``link``; another ``Dial`` takes its place where instances
are not across a network.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc

from protos import worker_pb2 as wire
from protos import worker_pb2_grpc
from services.router.membership import Instance
from services.runtime.certificates import NO_TLS, TlsFiles
from services.runtime.errors import Unavailable, to_service_error
from services.runtime.server import connect, token_metadata
from services.runtime.settings import Role

CONNECT_TIMEOUT_S = 3.0

Command = wire.PrefillCommand | wire.DecodeCommand
Events = wire.PrefillEvents | wire.DecodeEvents


class WorkStream(Protocol):
    """Commands out, events in, until either end breaks it."""

    async def write(self, command: Command) -> None:
        """Raises Unavailable: it is broken; ``events`` says why."""
        ...

    def events(self) -> AsyncIterator[Events]:
        """Ends when the instance ends the stream. Raises ServiceError: it broke."""
        ...

    async def close(self) -> None: ...


Dial = Callable[[Instance], Awaitable[WorkStream]]
"""Raises Unavailable: the instance does not answer."""


def dial_with(token: str, tls: TlsFiles = NO_TLS) -> Dial:
    """Dials ``Prefill.Run`` or ``Decode.Run``, by the instance's role, with the cluster token."""

    async def dial(instance: Instance) -> WorkStream:
        channel = await connect(instance.address, CONNECT_TIMEOUT_S, tls)
        is_prefill = instance.role is Role.PREFILL
        stub = worker_pb2_grpc.PrefillStub if is_prefill else worker_pb2_grpc.DecodeStub
        return _RemoteStream(channel, stub(channel).Run(metadata=token_metadata(token)))

    return dial


class _RemoteStream:
    """One call on a channel of its own."""

    def __init__(self, channel: grpc.aio.Channel, call: Any) -> None:
        self._channel = channel
        self._call = call

    async def write(self, command: Command) -> None:
        try:
            await self._call.write(command)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise Unavailable("the stream is broken") from error

    async def events(self) -> AsyncIterator[Events]:
        try:
            async for message in self._call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise to_service_error(error) from error

    async def close(self) -> None:
        await self._channel.close()
