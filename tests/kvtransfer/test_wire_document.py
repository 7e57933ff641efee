"""The vectors printed in docs/wire.md are what this implementation says and understands."""

from pathlib import Path

import pytest

from engine.kv.prefix import extend_chain, root_hash
from kvtransfer.handoff.frames import Cancel, First, Frame, Grant, Landed, Offer, Renew, Sent, Span
from kvtransfer.wire import (
    HEADER_BYTES,
    WIRE_VERSION,
    decode_data,
    encode_data,
    frame_from_proto,
    frame_to_proto,
)
from protos import kv_transfer_pb2 as pb

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "wire.md"
ID = bytes(range(16))
PAYLOAD = bytes(range(32))
SPAN = Span(1, 2, 1)
FIRST = First(ID, 33, 42)
FRAMES: dict[str, Frame] = {
    "offer request=r1 tokens=33": Offer(ID, "r1", 33),
    "grant held=16": Grant(ID, 16),
    "first position=33 token=42": FIRST,
    "sent frames=1 bytes=32": Sent(ID, 1, 32, FIRST),
    "landed": Landed(ID),
    "cancel reason=gone": Cancel(ID, "gone"),
    "renew": Renew((ID,)),
}


def vectors() -> dict[str, bytes]:
    block = DOCUMENT.read_text("utf-8").split("```vectors\n")[1].split("```")[0]
    lines = [line.rsplit(maxsplit=1) for line in block.splitlines()]
    return {name.strip(): bytes.fromhex(value) for name, value in lines}


@pytest.mark.parametrize("name", FRAMES)
def test_control_frames(name: str) -> None:
    assert frame_from_proto(pb.ControlFrame.FromString(vectors()[name])) == FRAMES[name]
    assert frame_to_proto(FRAMES[name]).SerializeToString() == vectors()[name]


@pytest.mark.parametrize(
    ("name", "is_bare"), [("data layer=1 first=2 blocks=1", False), ("data, bare", True)]
)
def test_data_frames(name: str, is_bare: bool) -> None:
    header = vectors()[name]
    assert len(header) == HEADER_BYTES
    assert b"".join(encode_data(ID, SPAN, [memoryview(PAYLOAD)], is_bare)) == header + PAYLOAD
    frame = decode_data(header + PAYLOAD)
    assert (frame.handoff_id, frame.span, frame.is_intact) == (ID, SPAN, True)
    assert frame.payload == PAYLOAD


def test_block_hashes() -> None:
    found = vectors()
    root = root_hash("m")
    assert root == found["root digest=m"]
    links = [found["link 0, tokens 0-15"], found["link 1, tokens 16-31"]]
    assert extend_chain(root, range(32)) == links


def test_every_vector_is_checked_and_the_version_is_said() -> None:
    others = {"data layer=1 first=2 blocks=1", "data, bare", "root digest=m"}
    others |= {"link 0, tokens 0-15", "link 1, tokens 16-31"}
    assert set(vectors()) == set(FRAMES) | others
    assert f"Version {WIRE_VERSION}." in DOCUMENT.read_text("utf-8")
