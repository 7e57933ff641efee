"""The transport for any network: gRPC, with KV bytes as raw messages on a channel of their own.

Knows streams and metadata. The cluster token is put into the metadata by whoever makes the
connector, and checked by an interceptor of the server. The services call ``RemoteConnector`` on
the source's side and ``add_kv_transfer_to_server`` on the target's.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from kvtransfer.errors import BadFrame, LinkLost
from kvtransfer.transports.interface import KvEndpoint
from protos import kv_transfer_pb2 as pb

SERVICE = "kvrelay.v1.KvTransfer"
SOURCE_KEY = "kvrelay-source"
TARGET_KEY = "kvrelay-target"

_MAX_MESSAGE_BYTES = 64 << 20
SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
]
"""What the server that hosts KvTransfer must be made with: large frames, frequent keepalives."""

_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


_BROKEN = (
    grpc.RpcError,
    grpc.aio.UsageError,
    grpc.aio.InternalError,
    asyncio.InvalidStateError,
)

T = TypeVar("T")


async def _or_lost(work: Awaitable[T], why: Callable[[], Awaitable[str]]) -> T:
    """``work``, its gRPC errors turned into LinkLost.

    gRPC cancels whoever waits on a call that was cancelled from the side; only a task that is
    itself being cancelled may see that as a cancellation.
    """
    try:
        return await work
    except _BROKEN as error:
        raise LinkLost(await why()) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise LinkLost(await why()) from error


class RemoteConnector:
    """Dials targets over gRPC.

    Args:
        metadata: goes with every stream; the cluster token belongs here.
        credentials: TLS; None is plain text.
    """

    def __init__(
        self,
        metadata: Sequence[tuple[str, str]] = (),
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._metadata = tuple(metadata)
        self._credentials = credentials

    async def __call__(
        self, address: str, source_instance_id: str, target_instance_id: str
    ) -> "RemoteLink":
        """A link whose control stream is dialled; the data stream is, when it is first used."""
        ids = ((SOURCE_KEY, source_instance_id), (TARGET_KEY, target_instance_id))
        return RemoteLink(self._channel(address), self._channel(address), (*self._metadata, *ids))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials, options=_CHANNEL_OPTIONS)


class RemoteLink:
    """The source's end of one pair: two channels, one stream on each."""

    def __init__(
        self,
        control_channel: grpc.aio.Channel,
        data_channel: grpc.aio.Channel,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self._control_channel = control_channel
        self._data_channel = data_channel
        self._metadata = metadata
        self._control: Any = control_channel.stream_stream(
            f"/{SERVICE}/Control",
            request_serializer=pb.ControlFrame.SerializeToString,
            response_deserializer=pb.ControlFrame.FromString,
        )(metadata=metadata)
        self._data: Any = None
        self._data_watcher: asyncio.Task[None] | None = None
        self._data_error = ""

    async def send(self, frame: pb.ControlFrame) -> None:
        """Put one frame on the control stream."""
        await _or_lost(self._control.write(frame), self._why)

    async def receive(self) -> pb.ControlFrame | None:
        """The target's next frame."""
        frame = await _or_lost(self._control.read(), self._why)
        return None if frame is grpc.aio.EOF else frame

    async def send_data(
        self, buffers: Sequence[bytes | memoryview], on_read: Callable[[], None]
    ) -> None:
        """Put one message on the data stream; it is copied before anything is awaited."""
        message = b"".join(buffers)
        on_read()
        if self._data is None:
            method = self._data_channel.stream_unary(f"/{SERVICE}/Data")
            self._data = method(metadata=self._metadata)
            self._data_watcher = asyncio.create_task(self._watch_data())
        await _or_lost(self._data.write(message), self._why)

    async def close(self) -> None:
        """Hang up both channels."""
        if self._data_watcher is not None:
            self._data_watcher.cancel()
            self._data.cancel()
        self._control.cancel()
        await self._data_channel.close()
        await self._control_channel.close()

    async def _watch_data(self) -> None:
        """The target never ends a data stream before we do: when one ends, so does the link."""
        self._data_error = f"the data stream broke: {await _status(self._data)}"
        self._control.cancel()

    async def _why(self) -> str:
        if self._data_error:
            return self._data_error
        return await _status(self._control) if self._control.done() else "the stream broke"


async def _status(call: Any) -> str:
    """How a call ended, once it has."""
    return f"{(await call.code()).name}: {await call.details()}"


class _ServedControl:
    """The target's end of a control stream."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def send(self, frame: pb.ControlFrame) -> None:
        await _or_lost(self._context.write(frame), _gone)

    async def receive(self) -> pb.ControlFrame | None:
        frame = await _or_lost(self._context.read(), _gone)
        return None if frame is grpc.aio.EOF else frame


async def _gone() -> str:
    return "the source is gone"


def add_kv_transfer_to_server(target: KvEndpoint, server: grpc.aio.Server) -> None:
    """Mount a target on a server made with ``SERVER_OPTIONS``."""

    async def control(_: AsyncIterator[pb.ControlFrame], context: Any) -> None:
        await target.serve_control(_ServedControl(context))

    async def data(messages: AsyncIterator[bytes], context: Any) -> bytes:
        metadata = dict(context.invocation_metadata())
        try:
            await target.serve_data(str(metadata.get(SOURCE_KEY, "")), messages)
        except BadFrame as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except LinkLost as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return b""

    handlers = {
        "Control": grpc.stream_stream_rpc_method_handler(
            control,
            request_deserializer=pb.ControlFrame.FromString,
            response_serializer=pb.ControlFrame.SerializeToString,
        ),
        "Data": grpc.stream_unary_rpc_method_handler(data),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
