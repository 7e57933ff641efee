"""The target of ``benchmarks.handoff``: a process of its own, started by it.

Prints its port; for each line ``HANDOFF_ID NUM_HELD_TOKENS`` on stdin it grants that handoff the
blocks from 0 on, and prints when it landed and the processor seconds spent so far. Also serves
``RAW``: a stream whose messages are read and forgotten.
"""

import asyncio
import mmap
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from kvtransfer.layout import KvLayout
from kvtransfer.target import KvTarget
from kvtransfer.transports.mounted import add_kv_transfer_to_server
from kvtransfer.transports.remote import SERVER_OPTIONS

LAYOUT = KvLayout("bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)
"""Of the demo model."""
RAW = "/benchmarks.Raw/Push"


class Memory:
    """KV memory without an engine: huge pages, one run of bytes, layer after layer."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * LAYOUT.block_bytes
        self._mapped = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapped.madvise(mmap.MADV_HUGEPAGE)

    def flat(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        return np.frombuffer(self._mapped, np.uint8)

    def fill(self) -> None:
        """Untouched pages are all one page, and flatter every figure."""
        self.flat()[:] = np.random.default_rng(0).integers(0, 256, self.num_bytes, np.uint8)

    def region(self, layer: int, block_id: int, num_blocks: int = 1) -> memoryview:
        start = (layer * self.num_blocks + block_id) * LAYOUT.region_bytes
        return memoryview(self._mapped)[start : start + num_blocks * LAYOUT.region_bytes]


async def grant(target: KvTarget, handoff_id: bytes, num_held_tokens: int) -> None:
    landing = target.expect(handoff_id, "r")
    num_tokens = (await landing.offered()).num_tokens
    landing.grant(range(LAYOUT.num_blocks_for(num_tokens)), num_held_tokens)
    await landing.landed()
    print(time.monotonic(), time.process_time(), flush=True)


async def push(messages: AsyncIterator[bytes], context: Any) -> bytes:
    async for _ in messages:
        pass
    return b"read"


async def serve() -> None:
    memory = Memory(8192 // LAYOUT.block_size)
    memory.fill()
    target = KvTarget("target", "digest", LAYOUT, memory)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_kv_transfer_to_server(target, server)
    service, method = RAW.strip("/").split("/")
    handler = grpc.stream_unary_rpc_method_handler(push)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        handoff_id, num_held_tokens = line.split()
        await grant(target, bytes.fromhex(handoff_id), int(num_held_tokens))


if __name__ == "__main__":
    asyncio.run(serve())
