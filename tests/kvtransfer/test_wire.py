"""Frames survive the wire unchanged; whatever is no frame is refused."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import BadFrame
from kvtransfer.handoff.frames import (
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
from kvtransfer.layout import KvLayout
from kvtransfer.memory import regions
from kvtransfer.wire import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    check_hello,
    decode_data,
    encode_data,
    frame_from_proto,
    frame_to_proto,
    hello,
    layout_from_proto,
    layout_to_proto,
    max_blocks_per_frame,
    split_message,
)
from protos import kv_transfer_pb2 as pb
from tests.kvtransfer.fakes import LAYOUT, FakeMemory

ID = bytes(range(16))
FIRST = First(ID, 7, 42, 3, b"more")
FRAMES: list[Frame] = [
    Offer(ID, "r1", 33, (b"a" * 32, b"b" * 32)),
    Grant(ID, 16),
    Wait(ID),
    Refuse(ID, "too long"),
    FIRST,
    Sent(ID, 3, 1 << 33, FIRST),
    Landed(ID),
    Cancel(ID, "gone"),
    Cancelled(ID),
    Renew((ID, ID[::-1])),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_control_frames_come_back_as_they_went(frame: Frame) -> None:
    assert frame_from_proto(pb.ControlFrame.FromString(_bytes(frame))) == frame


def _bytes(frame: Frame) -> bytes:
    return frame_to_proto(frame).SerializeToString()


@pytest.mark.parametrize(
    "message",
    [
        pb.ControlFrame(),
        pb.ControlFrame(hello=pb.Hello()),
        pb.ControlFrame(grant=pb.Grant(handoff_id=b"short")),
        pb.ControlFrame(offer=pb.Offer(handoff_id=ID, num_tokens=0)),
        pb.ControlFrame(renew=pb.Renew(handoff_ids=[ID, b""])),
        pb.ControlFrame(sent=pb.Sent(handoff_id=ID)),
        pb.ControlFrame(sent=pb.Sent(handoff_id=ID, first=pb.First(handoff_id=ID[::-1]))),
    ],
)
def test_malformed_control_frames_are_refused(message: pb.ControlFrame) -> None:
    with pytest.raises(BadFrame):
        frame_from_proto(message)


def data_frame() -> bytes:
    memory = FakeMemory()
    memory.fill()
    return b"".join(encode_data(ID, Span(1, 5, 3), regions(memory, 1, [9, 10, 2])))


def test_a_data_frame_carries_regions_in_logical_order() -> None:
    memory = FakeMemory()
    memory.fill()
    views = regions(memory, 1, [9, 10, 2])
    assert len(views) == 2, "adjacent blocks are one view"
    frame = decode_data(data_frame())
    assert (frame.handoff_id, frame.span, frame.is_intact) == (ID, Span(1, 5, 3), True)
    blocks = [memory.region(1, block) for block in (9, 10, 2)]
    assert bytes(frame.payload) == b"".join(blocks)
    assert len(data_frame()) == HEADER_BYTES + 3 * LAYOUT.region_bytes


def test_every_flipped_bit_is_noticed() -> None:
    message = data_frame()
    rng = random.Random(1)
    positions = [*range(HEADER_BYTES * 8), *rng.sample(range(len(message) * 8), 200)]
    for position in positions:
        damaged = bytearray(message)
        damaged[position // 8] ^= 1 << position % 8
        try:
            frame = decode_data(bytes(damaged))
        except BadFrame:
            continue
        assert not frame.is_intact


@given(st.binary(max_size=200))
def test_noise_is_no_frame(noise: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_data(noise)


@pytest.mark.parametrize("cut", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, -1])
def test_cut_or_padded_frames_are_refused(cut: int) -> None:
    message = data_frame()
    for wrong in (message[:cut], message + b"x"):
        with pytest.raises(BadFrame):
            decode_data(wrong)


def test_frames_fill_a_mebibyte() -> None:
    layout = KvLayout("bfloat16", 30, 3, 64, 16)
    blocks = max_blocks_per_frame(layout)
    assert blocks * layout.region_bytes <= MAX_PAYLOAD_BYTES < (blocks + 1) * layout.region_bytes
    assert max_blocks_per_frame(KvLayout("float32", 1, 32, 128, 256)) == 1


def test_layouts_come_back_as_they_went() -> None:
    layout = KvLayout("bfloat16", 30, 3, 64, 16, "dot")
    assert layout_from_proto(layout_to_proto(layout)) == layout


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "int3"), ("num_layers", 0), ("block_size", 0)]
)
def test_impossible_layouts_are_refused(field: str, value: object) -> None:
    message = layout_to_proto(LAYOUT)
    setattr(message, field, value)
    with pytest.raises(BadFrame, match=field if field == "dtype" else "at least 1"):
        layout_from_proto(message)


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("source_instance_id", hello("other", "t", "d", LAYOUT)),
        ("target_instance_id", hello("s", "other", "d", LAYOUT)),
        ("model_digest", hello("s", "t", "other", LAYOUT)),
        ("kv_layout.block_size", hello("s", "t", "d", KvLayout("float32", 3, 2, 4, 8))),
        ("kv_layout.order", hello("s", "t", "d", KvLayout("float32", 3, 2, 4, 4, "dot"))),
    ],
)
def test_a_hello_that_differs_is_named(field: str, theirs: pb.ControlFrame) -> None:
    ours = hello("s", "t", "d", LAYOUT)
    assert check_hello(ours, ours) is None
    assert str(check_hello(ours, theirs)).startswith(field)


def test_another_wire_version_is_named() -> None:
    ours, theirs = hello("s", "t", "d", LAYOUT), hello("s", "t", "d", LAYOUT)
    theirs.hello.wire_version += 1
    assert str(check_hello(ours, theirs)).startswith("wire_version")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=5))
def test_a_message_of_several_frames_comes_apart_again(frames: list[tuple[int, int]]) -> None:
    memory = FakeMemory()
    memory.fill()
    message = b""
    for first, count in frames:
        views = regions(memory, 0, range(first, first + count))
        message += b"".join(encode_data(ID, Span(0, first, count), views))
    found = list(split_message(message))
    assert [frame.span for frame in found] == [Span(0, first, count) for first, count in frames]
    assert all(frame.is_intact for frame in found)
    with pytest.raises(BadFrame):
        list(split_message(message + b"more"))
    with pytest.raises(BadFrame):
        list(split_message(message[:-1]))


def test_a_bare_frame_is_checked_by_its_header_alone() -> None:
    view = memoryview(bytearray(LAYOUT.region_bytes))
    message = bytearray(b"".join(encode_data(ID, Span(0, 0, 1), [view], is_bare=True)))
    message[-1] ^= 1
    assert decode_data(bytes(message)).is_intact
    message[HEADER_BYTES - 12] ^= 1
    assert not decode_data(bytes(message)).is_intact
