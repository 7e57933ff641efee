"""The target's end of ``remote``: KvTransfer mounted on a gRPC server.

Control frames go to the target as they come; a Hello that offers shared memory is answered with
whether we could map it. Data messages go to it whole, wherever they lie. Knows streams, not
handoffs. The services call ``add_kv_transfer_to_server``.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvtransfer.errors import BadFrame, LinkLost
from kvtransfer.handoff.frames import Refuse
from kvtransfer.transports.interface import KvEndpoint
from kvtransfer.transports.negotiation import map_ring
from kvtransfer.transports.remote import ACK, SERVICE, SOURCE_KEY, or_lost
from kvtransfer.transports.shared_memory import RingReader
from kvtransfer.wire import frame_to_proto
from protos import kv_transfer_pb2 as pb


class _ServedControl:
    """The target's end of a control stream; maps what the source's Hello offers."""

    def __init__(self, context: Any, transport: str, controls: "dict[str, _ServedControl]") -> None:
        self._context = context
        self._transport = transport
        self._controls = controls
        self.source_id = ""
        self.ring: RingReader | None = None
        self._reason = ""

    async def send(self, frame: pb.ControlFrame) -> None:
        if frame.HasField("hello"):
            answer = pb.ControlFrame()
            answer.CopyFrom(frame)
            answer.hello.transport = "grpc" if self.ring is None else "shared_memory"
            answer.hello.transport_reason = self._reason
            frame = answer
            self._controls[self.source_id] = self
        await or_lost(self._context.write(frame), _gone)

    async def receive(self) -> pb.ControlFrame | None:
        frame = await or_lost(self._context.read(), _gone)
        if frame is grpc.aio.EOF:
            return None
        if frame.HasField("hello"):
            self.source_id = frame.hello.source_instance_id
            try:
                self.ring, self._reason = map_ring(self._transport, frame.hello)
            except LinkLost as error:
                await self.send(frame_to_proto(Refuse(b"", str(error))))
                raise
        return frame  # type: ignore[no-any-return]


async def _gone() -> str:
    return "the source is gone"


class _Mount:
    """One target on one server: its connections, and the memory each of them may use."""

    def __init__(self, target: KvEndpoint, transport: str) -> None:
        self._target = target
        self._transport = transport
        self._controls: dict[str, _ServedControl] = {}

    async def control(self, _: AsyncIterator[pb.ControlFrame], context: Any) -> None:
        stream = _ServedControl(context, self._transport, self._controls)
        try:
            await self._target.serve_control(stream)
        finally:
            if self._controls.get(stream.source_id) is stream:
                del self._controls[stream.source_id]

    async def data(self, messages: AsyncIterator[bytes], context: Any) -> None:
        source_id = str(dict(context.invocation_metadata()).get(SOURCE_KEY, ""))
        control = self._controls.get(source_id)
        ring = control.ring if control is not None else None
        try:
            whole = messages if ring is None else _slots(messages, ring, context)
            await self._target.serve_data(source_id, whole)
        except BadFrame as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except LinkLost as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


async def _slots(
    messages: AsyncIterator[bytes], ring: RingReader, context: Any
) -> AsyncIterator[bytes | memoryview]:
    """Messages, wherever they lie; a slot is acknowledged when the next message is asked for,
    several at once while they are few bytes."""
    num_slots, num_bytes = 0, 0
    async for message in messages:
        if not ring.is_slot(message):
            yield message
            continue
        found = ring.message(message)
        yield found
        num_slots, num_bytes = num_slots + 1, num_bytes + len(found)
        if num_bytes >= ring.num_bytes // 8:
            await or_lost(context.write(ACK.pack(num_slots)), _gone)
            num_slots, num_bytes = 0, 0


def add_kv_transfer_to_server(
    target: KvEndpoint, server: grpc.aio.Server, transport: str = "auto"
) -> None:
    """Mount a target on a server made with ``SERVER_OPTIONS``.

    Args:
        transport: one of ``negotiation.TRANSPORTS``.
    """
    mount = _Mount(target, transport)
    handlers = {
        "Control": grpc.stream_stream_rpc_method_handler(
            mount.control,
            request_deserializer=pb.ControlFrame.FromString,
            response_serializer=pb.ControlFrame.SerializeToString,
        ),
        "Data": grpc.stream_stream_rpc_method_handler(mount.data),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
