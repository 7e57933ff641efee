"""KV bytes between two processes of one host: a ring of memory that only the source can write.

    source  reserve ── write ── (slot) ──▶ target  message ── (copied) ── acknowledgement ──▶ free

The memory is an anonymous file sealed so that nobody but its maker's first mapping can write it,
grow it or shrink it: no peer can damage it, a reader cannot be made to fault, and nothing outlives
the two processes. The target opens it through the source's entry in /proc, which works only for
the same user in the same process namespace, leaves nothing on disk, and needs no socket; a random
token in its first page proves that it is the memory that was meant, whatever became of the pid.

A slot is written again only after the target has said that it copied it, and a new connection has
a new ring, so a target never copies what a source has reused. Knows nothing of streams or
handoffs; ``remote`` carries slots and acknowledgements. Linux only: elsewhere ``Ring`` raises.
"""

import fcntl
import mmap
import os
import secrets
import struct
from collections import deque
from collections.abc import Sequence

from kvtransfer.errors import BadFrame
from kvtransfer.memory import copy_bytes
from protos import kv_transfer_pb2 as pb

RING_BYTES = 16 << 20
"""Enough for sixteen frames under way; small enough to stay near the processor."""

_NAME = "kvrelay-kv"
_TOKEN_BYTES = 16
_DATA_START = mmap.PAGESIZE
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x02, 0x04, 0x10
_SEALS = _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE
_SLOT = struct.Struct(f"<4s{_TOKEN_BYTES}sQQ")
_SLOT_MAGIC = b"KVsl"


class Ring:
    """The source's end: slots are reserved in order, and freed in order.

    Raises:
        OSError: this system has no such memory.
    """

    def __init__(self, num_bytes: int = RING_BYTES) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd")
        self.num_bytes = num_bytes
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, _DATA_START + num_bytes)
            self._memory = mmap.mmap(self._fd, _DATA_START + num_bytes)
            self._memory[:_TOKEN_BYTES] = self._token
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(self._fd)
            raise
        self._head = 0  # where the next slot starts, counted on without wrapping
        self._tail = 0
        self._slot_ends: deque[int] = deque()

    @property
    def max_message_bytes(self) -> int:
        """What is longer does not go through the ring."""
        return self.num_bytes // 4

    def describe(self) -> pb.SharedMemory:
        """What a target needs to find it."""
        return pb.SharedMemory(
            pid=os.getpid(), fd=self._fd, num_bytes=self.num_bytes, token=self._token
        )

    def put(self, buffers: Sequence[bytes | memoryview]) -> bytes | None:
        """Copy a message into the next slot and name it; None: no room before some are freed."""
        length = sum(memoryview(buffer).nbytes for buffer in buffers)
        start = self._head % self.num_bytes
        skipped = self.num_bytes - start if start + length > self.num_bytes else 0
        if self._head + skipped + length - self._tail > self.num_bytes:
            return None
        offset = (start + skipped) % self.num_bytes
        self._head += skipped + length
        self._slot_ends.append(self._head)
        view = memoryview(self._memory)
        position = _DATA_START + offset
        for buffer in buffers:
            source = memoryview(buffer)
            copy_bytes(view[position : position + source.nbytes], source)
            position += source.nbytes
        return _SLOT.pack(_SLOT_MAGIC, self._token, offset, length)

    def free(self, num_slots: int) -> None:
        """The target has copied the oldest ``num_slots`` slots.

        Raises:
            BadFrame: more than are in use.
        """
        if num_slots > len(self._slot_ends):
            raise BadFrame(f"{num_slots} slots acknowledged, {len(self._slot_ends)} are in use")
        for _ in range(num_slots):
            self._tail = self._slot_ends.popleft()

    def close(self) -> None:
        """Idempotent. The target keeps its mapping until it lets go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RingReader:
    """The target's end: the same memory, read-only.

    Raises:
        OSError: it cannot be opened from here, or is not what the source says: one line.
    """

    def __init__(self, where: pb.SharedMemory) -> None:
        path = f"/proc/{where.pid}/fd/{where.fd}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                raise OSError("another process has the source's pid here")
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(f"the source's memory cannot be opened from here: {reason}") from error
        try:
            if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
                raise OSError("the source's memory is not sealed")
            if os.fstat(fd).st_size != _DATA_START + where.num_bytes:
                raise OSError("the source's memory has another size")
            self._memory = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        self.num_bytes = where.num_bytes
        self._token = bytes(self._memory[:_TOKEN_BYTES])
        if not secrets.compare_digest(self._token, where.token):
            raise OSError("the source's memory has another token: not the same process")

    @staticmethod
    def is_slot(message: bytes) -> bool:
        """Whether a message names a slot, instead of being a frame itself."""
        return len(message) == _SLOT.size and message.startswith(_SLOT_MAGIC)

    def message(self, slot: bytes) -> memoryview:
        """The message in a slot, not copied.

        Raises:
            BadFrame: a slot of another ring, or outside it.
        """
        _, token, offset, length = _SLOT.unpack(slot)
        if token != self._token:
            raise BadFrame("a slot of another connection's memory")
        if offset + length > self.num_bytes:
            raise BadFrame("a slot outside the memory")
        start = _DATA_START + offset
        return memoryview(self._memory)[start : start + length]
