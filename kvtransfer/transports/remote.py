"""The transport for any network: gRPC, with KV bytes as raw messages on a channel of their own.

Between processes of one host a data message may be the name of a slot in shared memory instead of
the frame itself (``shared_memory``); Hellos that pass through settle that (``negotiation``).
Control frames always travel here.

Knows streams and metadata. The cluster token is put into the metadata by whoever makes the
connector, and checked by an interceptor of the server. This is the source's end; the services
call ``RemoteConnector``. The target's is ``mounted``.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from kvtransfer.errors import BadFrame, LinkLost
from kvtransfer.transports.negotiation import make_ring, settle
from kvtransfer.transports.shared_memory import Ring
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


_MESSAGE_BYTES = 1 << 20
"""Measured: shorter ones pay more per message, longer ones overlap less of copying and sending."""
ACK = struct.Struct("<I")
"""On the way back of a data stream: how many more slots were copied."""

_BROKEN = (
    grpc.RpcError,
    grpc.aio.UsageError,
    grpc.aio.InternalError,
    asyncio.InvalidStateError,
)

T = TypeVar("T")


async def or_lost(work: Awaitable[T], why: Callable[[], Awaitable[str]]) -> T:
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
        credentials: asked before every dial, as certificates are rotated; None is plain text.
        transport: one of ``negotiation.TRANSPORTS``.
        options: more channel options.
    """

    def __init__(
        self,
        metadata: Sequence[tuple[str, str]] = (),
        credentials: Callable[[], grpc.ChannelCredentials | None] = lambda: None,
        transport: str = "auto",
        options: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._options = (*_CHANNEL_OPTIONS, *options)
        self._metadata = tuple(metadata)
        self._transport = transport
        self._credentials = credentials

    async def __call__(
        self, address: str, source_instance_id: str, target_instance_id: str
    ) -> "RemoteLink":
        """A link whose control stream is dialled; the data stream is, when it is first used."""
        ids = ((SOURCE_KEY, source_instance_id), (TARGET_KEY, target_instance_id))
        ring = make_ring(self._transport)
        channels = self._channel(address), self._channel(address)
        return RemoteLink(address, channels, (*self._metadata, *ids), ring, self._transport)

    def _channel(self, address: str) -> grpc.aio.Channel:
        credentials = self._credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=self._options)
        return grpc.aio.secure_channel(address, credentials, options=self._options)


class RemoteLink:
    """The source's end of one pair: two channels, one stream on each, perhaps a ring beside."""

    def __init__(
        self,
        address: str,
        channels: tuple[grpc.aio.Channel, grpc.aio.Channel],
        metadata: tuple[tuple[str, str], ...],
        ring: Ring | None,
        transport: str,
    ) -> None:
        self._address = address
        self._control_channel, self._data_channel = channels
        self._metadata = metadata
        self._offered = ring
        self._ring: Ring | None = None  # the offered one, once the target has mapped it
        self._transport = transport
        self._control: Any = self._control_channel.stream_stream(
            f"/{SERVICE}/Control",
            request_serializer=pb.ControlFrame.SerializeToString,
            response_deserializer=pb.ControlFrame.FromString,
        )(metadata=metadata)
        self._data: Any = None
        self._data_watcher: asyncio.Task[None] | None = None
        self._data_error = ""
        self._writing: asyncio.Task[None] | None = None
        self._acknowledged = asyncio.Event()

    @property
    def is_bare(self) -> bool:
        return self._ring is not None

    @property
    def message_bytes(self) -> int:
        if self._ring is None:
            return _MESSAGE_BYTES
        return self._ring.max_message_bytes * 15 // 16  # the rest is for frame headers

    @property
    def transport(self) -> str:
        """What the Hellos settled: grpc or shared_memory."""
        return "grpc" if self._ring is None else "shared_memory"

    async def send(self, frame: pb.ControlFrame) -> None:
        """Put one frame on the control stream; a Hello takes our offer along."""
        if self._offered is not None and frame.HasField("hello"):
            offer = pb.ControlFrame()
            offer.CopyFrom(frame)
            offer.hello.shared_memory.CopyFrom(self._offered.describe())
            frame = offer
        await or_lost(self._control.write(frame), self._why)

    async def receive(self) -> pb.ControlFrame | None:
        """The target's next frame."""
        frame = await or_lost(self._control.read(), self._why)
        if frame is grpc.aio.EOF:
            return None
        if frame.HasField("hello") and settle(self._transport, self._address, frame.hello):
            self._ring = self._offered
        return frame  # type: ignore[no-any-return]

    async def send_data(
        self, buffers: Sequence[bytes | memoryview], on_read: Callable[[], None]
    ) -> None:
        """Put one message on the data stream, or in the ring and its slot on the stream.

        One message may be on its way into the stream while the next is copied.
        """
        if self._data_error:
            raise LinkLost(self._data_error)
        if self._data is None:
            method = self._data_channel.stream_stream(f"/{SERVICE}/Data")
            self._data = method(metadata=self._metadata)
            self._data_watcher = asyncio.create_task(self._watch_data())
        message = await self._into_ring(buffers)
        if message is None:
            message = b"".join(buffers)
        on_read()
        if self._writing is not None:
            await self._writing
        self._writing = asyncio.create_task(or_lost(self._data.write(message), self._why))

    async def close(self) -> None:
        """Hang up both channels; whoever waits for room learns it."""
        self._data_error = self._data_error or "the connection was closed"
        self._acknowledged.set()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        if self._data_watcher is not None:
            self._data_watcher.cancel()
            self._data.cancel()
        self._control.cancel()
        await self._data_channel.close()
        await self._control_channel.close()
        if self._offered is not None:
            self._offered.close()

    async def _into_ring(self, buffers: Sequence[bytes | memoryview]) -> bytes | None:
        """The slot a message lies in, once there is room; None: it must travel itself."""
        ring = self._ring
        if ring is None or sum(map(len, buffers)) > ring.max_message_bytes:
            return None
        while (slot := ring.put(buffers)) is None:
            self._acknowledged.clear()
            await self._acknowledged.wait()
            if self._data_error:
                raise LinkLost(self._data_error)
        return slot

    async def _watch_data(self) -> None:
        """Hear acknowledgements. The target never ends a data stream before we do: when one
        ends, so does the link."""
        reason = ""
        try:
            while (message := await self._data.read()) is not grpc.aio.EOF:
                if self._ring is None or len(message) != ACK.size:
                    raise BadFrame("the target acknowledges what is no slot")
                self._ring.free(*ACK.unpack(message))
                self._acknowledged.set()
        except BadFrame as error:
            reason = str(error)
            self._data.cancel()
        except _BROKEN:
            pass  # the status says more
        self._data_error = f"the data stream broke: {reason or await _status(self._data)}"
        self._acknowledged.set()
        self._control.cancel()

    async def _why(self) -> str:
        if self._data_error:
            return self._data_error
        return await _status(self._control) if self._control.done() else "the stream broke"


async def _status(call: Any) -> str:
    """How a call ended, once it has."""
    return f"{(await call.code()).name}: {await call.details()}"
