"""What travels: data frames with checksums, and control frames as protobuf.

A data frame is a 44-byte header and the regions of some logical blocks of one layer, one after
the other; a message is one or more of them. A frame's
checksum covers its header, and its payload where a network may damage it.
Everything that comes in is checked here once; nothing behind this file re-checks form.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from kvtransfer.errors import BadFrame
from kvtransfer.handoff.frames import (
    HANDOFF_ID_BYTES,
    Cancel,
    Cancelled,
    First,
    Frame,
    Grant,
    Landed,
    Offer,
    Refuse,
    Renew,
    Sent,
    Span,
    Wait,
)
from kvtransfer.layout import DTYPE_BYTES, KvLayout
from protos import kv_transfer_pb2 as pb

WIRE_VERSION = 2
MAX_PAYLOAD_BYTES = 1 << 20
"""A frame carries at most this much, unless a single region is larger."""

_MAGIC = b"KVfr"
_HEADER = struct.Struct(f"<4sHH{HANDOFF_ID_BYTES}sIIII")
_FLAG_BARE = 1  # the checksum leaves the payload out: it never left this host's memory
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class DataFrame:
    """One data frame that came in: whole, and as long as it says."""

    handoff_id: bytes
    span: Span
    payload: memoryview
    is_intact: bool
    """Header and payload are what the source sent."""


def max_blocks_per_frame(layout: KvLayout) -> int:
    """How many blocks of one layer a data frame carries."""
    return max(1, MAX_PAYLOAD_BYTES // layout.region_bytes)


def encode_data(
    handoff_id: bytes, span: Span, views: Sequence[memoryview], is_bare: bool = False
) -> list[bytes | memoryview]:
    """Header and payload, without copying the payload.

    Args:
        is_bare: leave the payload out of the checksum.
    """
    num_bytes = sum(view.nbytes for view in views)
    flags = _FLAG_BARE if is_bare else 0
    where = (span.layer, span.first_block, span.num_blocks)
    header = _HEADER.pack(_MAGIC, WIRE_VERSION, flags, handoff_id, *where, num_bytes)
    checksum = _checksum(header, [] if is_bare else views)
    return [header + _CHECKSUM.pack(checksum), *views]


def _checksum(header: bytes | memoryview, views: Sequence[memoryview]) -> int:
    """The low 32 bits of XXH3-64: ten times as fast as a CRC, and the network has its own."""
    hasher = xxhash.xxh3_64(header)
    for view in views:
        hasher.update(view)
    return hasher.intdigest() & 0xFFFF_FFFF


def split_message(message: bytes | memoryview) -> Iterator[DataFrame]:
    """The frames of a data message: one or more, back to back.

    Raises:
        BadFrame: as ``decode_data``, at the first that is none.
    """
    rest = memoryview(message)
    while True:
        end = len(rest)
        if end >= HEADER_BYTES:
            end = min(end, HEADER_BYTES + _HEADER.unpack_from(rest)[-1])
        # What follows a whole frame must be one too; a short one is refused by its length.
        yield decode_data(rest[:end])
        rest = rest[end:]
        if not rest:
            return


def decode_data(message: bytes | memoryview) -> DataFrame:
    """One data frame; the payload is a view into ``message``.

    Raises:
        BadFrame: not a frame of this version, or not as long as it says.
    """
    if len(message) < HEADER_BYTES:
        raise BadFrame(f"data frame of {len(message)} bytes is shorter than its header")
    magic, version, flags, handoff_id, layer, first_block, num_blocks, num_bytes = (
        _HEADER.unpack_from(message)
    )
    if magic != _MAGIC or version != WIRE_VERSION or flags & ~_FLAG_BARE:
        raise BadFrame(f"not a data frame of wire version {WIRE_VERSION}")
    if num_bytes != len(message) - HEADER_BYTES:
        raise BadFrame(
            f"data frame says {num_bytes} payload bytes, has {len(message) - HEADER_BYTES}"
        )
    view = memoryview(message)
    payload = view[HEADER_BYTES:]
    checksum = _checksum(view[: _HEADER.size], [] if flags & _FLAG_BARE else [payload])
    is_intact = _CHECKSUM.unpack_from(message, _HEADER.size)[0] == checksum
    return DataFrame(handoff_id, Span(layer, first_block, num_blocks), payload, is_intact)


def layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    """The KV layout as it stands in Hello and Register."""
    return pb.KvLayout(
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        order=layout.order,
    )


def layout_from_proto(message: pb.KvLayout) -> KvLayout:
    """The KV layout a peer named.

    Raises:
        BadFrame: an unknown dtype, or a size that is zero.
    """
    if message.dtype not in DTYPE_BYTES:
        raise BadFrame(f"kv_layout.dtype: {message.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    sizes = (message.num_layers, message.num_kv_heads, message.head_dim, message.block_size)
    if min(sizes) < 1:
        raise BadFrame("kv_layout: every size must be at least 1")
    return KvLayout(message.dtype, *sizes, order=message.order)


def frame_to_proto(frame: Frame) -> pb.ControlFrame:
    """A control frame for the wire."""
    match frame:
        case Offer():
            offer = pb.Offer(
                handoff_id=frame.handoff_id,
                request_id=frame.request_id,
                num_tokens=frame.num_tokens,
                block_hashes=frame.block_hashes,
            )
            return pb.ControlFrame(offer=offer)
        case Grant():
            grant = pb.Grant(handoff_id=frame.handoff_id, num_held_tokens=frame.num_held_tokens)
            return pb.ControlFrame(grant=grant)
        case Wait():
            return pb.ControlFrame(wait=pb.Wait(handoff_id=frame.handoff_id))
        case Refuse():
            refuse = pb.Refuse(handoff_id=frame.handoff_id, reason=frame.reason)
            return pb.ControlFrame(refuse=refuse)
        case First():
            return pb.ControlFrame(first=_first_to_proto(frame))
        case Sent():
            sent = pb.Sent(
                handoff_id=frame.handoff_id,
                num_frames=frame.num_frames,
                num_bytes=frame.num_bytes,
                first=_first_to_proto(frame.first),
            )
            return pb.ControlFrame(sent=sent)
        case Landed():
            return pb.ControlFrame(landed=pb.Landed(handoff_id=frame.handoff_id))
        case Cancel():
            cancel = pb.Cancel(handoff_id=frame.handoff_id, reason=frame.reason)
            return pb.ControlFrame(cancel=cancel)
        case Cancelled():
            return pb.ControlFrame(cancelled=pb.Cancelled(handoff_id=frame.handoff_id))
        case Renew():
            return pb.ControlFrame(renew=pb.Renew(handoff_ids=frame.handoff_ids))


def frame_from_proto(message: pb.ControlFrame) -> Frame:
    """The control frame a peer sent.

    Raises:
        BadFrame: of no kind we know, a second Hello, or without a proper handoff id.
    """
    match message.WhichOneof("frame"):
        case "offer":
            offer = message.offer
            handoff_id = _id(offer.handoff_id)
            if offer.num_tokens < 1:
                raise BadFrame("an offer of no tokens")
            return Offer(handoff_id, offer.request_id, offer.num_tokens, tuple(offer.block_hashes))
        case "grant":
            return Grant(_id(message.grant.handoff_id), message.grant.num_held_tokens)
        case "wait":
            return Wait(_id(message.wait.handoff_id))
        case "refuse":
            return Refuse(_id(message.refuse.handoff_id), message.refuse.reason)
        case "first":
            return _first_from_proto(message.first)
        case "sent":
            sent = message.sent
            handoff_id, first = _id(sent.handoff_id), _first_from_proto(sent.first)
            if first.handoff_id != handoff_id:
                raise BadFrame("SENT repeats the FIRST of another handoff")
            return Sent(handoff_id, sent.num_frames, sent.num_bytes, first)
        case "landed":
            return Landed(_id(message.landed.handoff_id))
        case "cancel":
            return Cancel(_id(message.cancel.handoff_id), message.cancel.reason)
        case "cancelled":
            return Cancelled(_id(message.cancelled.handoff_id))
        case "renew":
            return Renew(tuple(_id(handoff_id) for handoff_id in message.renew.handoff_ids))
        case kind:
            raise BadFrame(f"control frame of an unexpected kind: {kind}")


def _first_to_proto(first: First) -> pb.First:
    return pb.First(
        handoff_id=first.handoff_id,
        position=first.position,
        token_id=first.token_id,
        num_cached_tokens=first.num_cached_tokens,
        details=first.details,
    )


def _first_from_proto(message: pb.First) -> First:
    handoff_id = _id(message.handoff_id)
    return First(
        handoff_id, message.position, message.token_id, message.num_cached_tokens, message.details
    )


def _id(handoff_id: bytes) -> bytes:
    if len(handoff_id) != HANDOFF_ID_BYTES:
        raise BadFrame(f"a handoff id of {len(handoff_id)} bytes, not {HANDOFF_ID_BYTES}")
    return handoff_id


def hello(
    source_instance_id: str, target_instance_id: str, model_digest: str, layout: KvLayout
) -> pb.ControlFrame:
    """The first frame of a control stream, from either end: who we are, what we speak."""
    message = pb.Hello(
        wire_version=WIRE_VERSION,
        source_instance_id=source_instance_id,
        target_instance_id=target_instance_id,
        model_digest=model_digest,
        kv_layout=layout_to_proto(layout),
    )
    return pb.ControlFrame(hello=message)


def check_hello(ours: pb.ControlFrame, theirs: pb.ControlFrame) -> str | None:
    """In what the peer's Hello differs from the one we expect, in one line; None: in nothing.

    Raises:
        BadFrame: it is no Hello, or names an impossible KV layout.
    """
    if theirs.WhichOneof("frame") != "hello":
        raise BadFrame(f"expected a Hello, got {theirs.WhichOneof('frame')}")
    for field in ("wire_version", "source_instance_id", "target_instance_id", "model_digest"):
        expected, found = getattr(ours.hello, field), getattr(theirs.hello, field)
        if expected != found:
            return f"{field}: {found!r}, here it is {expected!r}"
    expected_layout = layout_from_proto(ours.hello.kv_layout)
    difference = expected_layout.difference(layout_from_proto(theirs.hello.kv_layout))
    return None if difference is None else f"kv_layout.{difference}"
