"""KV memory as kvtransfer sees it: byte regions by layer and block id.

The engine's cache implements ``KvMemory``; tests use a bytearray per layer. Nothing here knows
what the bytes mean.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class KvMemory(Protocol):
    """Regions of one instance's KV cache."""

    def region(self, layer: int, block_id: int, num_blocks: int = 1) -> memoryview:
        """Writable bytes of ``num_blocks`` blocks of a layer, adjacent from ``block_id`` on."""
        ...


def regions(memory: KvMemory, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
    """The regions of ``block_ids`` in order; runs of adjacent ids become one view."""
    views: list[memoryview] = []
    start = 0
    for index in range(1, len(block_ids) + 1):
        if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:
            views.append(memory.region(layer, block_ids[start], index - start).cast("B"))
            start = index
    return views


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes of equal length; other threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
