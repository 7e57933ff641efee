"""The ring of sealed memory: nobody but its maker writes it, no slot is reused before its time."""

import fcntl
import mmap
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import BadFrame, LinkLost
from kvtransfer.transports.negotiation import make_ring, map_ring, settle
from kvtransfer.transports.shared_memory import Ring, RingReader
from protos import kv_transfer_pb2 as pb

SIZE = 4 * mmap.PAGESIZE


@given(st.lists(st.one_of(st.integers(1, SIZE // 4), st.just("free")), max_size=60))
def test_a_slot_keeps_its_bytes_until_it_is_acknowledged(moves: list[int | str]) -> None:
    ring = Ring(SIZE)
    reader = RingReader(ring.describe())
    in_use: list[tuple[bytes, bytes]] = []
    for number, move in enumerate(moves):
        if isinstance(move, str):
            if in_use:
                ring.free(1)
                in_use.pop(0)
        else:
            content = bytes([number % 251]) * move
            slot = ring.put([content[: move // 2], memoryview(content)[move // 2 :]])
            if slot is None:
                assert in_use, "an empty ring takes any message of the allowed length"
            else:
                in_use.append((slot, content))
        for slot, content in in_use:
            assert reader.is_slot(slot) and reader.message(slot) == content
    ring.close()


def test_nobody_else_can_write_grow_or_shrink_it() -> None:
    ring = Ring(SIZE)
    path = f"/proc/{os.getpid()}/fd/{ring.describe().fd}"
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SIZE)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    for num_bytes in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, num_bytes)
    os.close(fd)
    view = RingReader(ring.describe()).message(ring.put([b"abc"]) or b"")
    assert view.readonly and bytes(view) == b"abc"
    ring.close()
    assert bytes(view) == b"abc", "a mapping outlives the descriptor"


def test_what_is_not_the_sources_memory_is_not_mapped() -> None:
    ring = Ring(SIZE)
    where = ring.describe()
    unsealed = os.memfd_create("kvrelay-kv", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SIZE)
    stranger = os.open("/dev/null", os.O_RDONLY)
    for change, reason in (
        (pb.SharedMemory(token=b"x" * 16), "another token"),
        (pb.SharedMemory(num_bytes=SIZE + 1), "another size"),
        (pb.SharedMemory(pid=0x7FFFFFFF), "cannot be opened"),
        (pb.SharedMemory(fd=stranger), "another process"),
        (pb.SharedMemory(fd=unsealed), "not sealed"),
    ):
        wrong = pb.SharedMemory()
        wrong.CopyFrom(where)
        wrong.MergeFrom(change)
        with pytest.raises(OSError, match=reason):
            RingReader(wrong)
    assert fcntl.fcntl(unsealed, fcntl.F_GETFD) >= 0
    os.close(unsealed)
    os.close(stranger)
    ring.close()


def test_a_wrong_slot_or_acknowledgement_is_refused() -> None:
    ring, other = Ring(SIZE), Ring(SIZE)
    slot = ring.put([b"abc"])
    assert slot is not None
    with pytest.raises(BadFrame, match="another connection"):
        RingReader(other.describe()).message(slot)
    with pytest.raises(BadFrame, match="outside"):
        RingReader(ring.describe()).message(slot[:20] + struct.pack("<QQ", SIZE, 1))
    with pytest.raises(BadFrame, match="2 slots acknowledged, 1"):
        ring.free(2)
    ring.close()
    other.close()


def hello(ring: Ring | None) -> pb.Hello:
    return pb.Hello(shared_memory=ring.describe() if ring is not None else None)


def test_auto_takes_the_best_that_both_ends_can() -> None:
    ring = make_ring("auto")
    assert ring is not None and make_ring("grpc") is None
    reader, reason = map_ring("auto", hello(ring))
    assert reader is not None and reason == ""
    assert map_ring("grpc", hello(ring)) == (None, "the target is started with --transport grpc")
    assert map_ring("auto", hello(None)) == (None, "the source offers no shared memory")
    assert settle("auto", "a", pb.Hello(transport="shared_memory"))
    assert not settle("auto", "a", pb.Hello(transport="grpc", transport_reason="another host"))
    ring.close()


def test_what_is_demanded_and_cannot_be_had_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LinkLost, match="the source offers no shared memory"):
        map_ring("shared_memory", hello(None))
    with pytest.raises(LinkLost, match="another host; use --transport auto"):
        settle("shared_memory", "a", pb.Hello(transport="grpc", transport_reason="another host"))
    monkeypatch.delattr(os, "memfd_create")
    assert make_ring("auto") is None
    with pytest.raises(LinkLost, match="no memfd"):
        make_ring("shared_memory")
