"""Memory for weights: 2 MiB aligned, in huge pages where the system has them.

Decode reads every weight once a token; in small pages that costs a third of the bandwidth.
Called by ``native_model``.
"""

import mmap

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 1 << 21
ALIGNMENT = 64


class Arena:
    """One allocation, given out front to back: what is read in turn lies in turn."""

    def __init__(self, num_bytes: int) -> None:
        # Shared memory, Python's default, gets no huge pages.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, max(num_bytes, 1) + HUGE_PAGE, flags=private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE
        self._bytes = whole[start : start + num_bytes]
        self._used = 0

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The next ``num_bytes``, zeroed, 64-byte aligned.

        Raises:
            MemoryError: the arena was made too small.
        """
        if self._used + num_bytes > len(self._bytes):
            raise MemoryError(f"arena of {len(self._bytes)} bytes is full")
        taken = self._bytes[self._used : self._used + num_bytes]
        self._used += padded(num_bytes)
        return taken


def padded(num_bytes: int) -> int:
    """What ``Arena.take`` uses up."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
