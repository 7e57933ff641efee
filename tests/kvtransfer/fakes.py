"""KV memory in bytearrays, and a source and a target beside each other."""

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtransfer.layout import KvLayout
from kvtransfer.source import KvSource, SourceHandoff
from kvtransfer.target import KvTarget
from kvtransfer.transports.interface import Connect
from kvtransfer.transports.loopback import Faults, LoopbackNetwork

LAYOUT = KvLayout("float32", num_layers=3, num_kv_heads=2, head_dim=4, block_size=4)
NUM_BLOCKS = 64
ADDRESS = "target:1"


def new_id() -> bytes:
    return os.urandom(16)


class FakeMemory:
    """One bytearray a layer; adjacent block ids are adjacent bytes."""

    def __init__(self, layout: KvLayout = LAYOUT, num_blocks: int = NUM_BLOCKS) -> None:
        self.layout = layout
        self.layers = [
            bytearray(num_blocks * layout.region_bytes) for _ in range(layout.num_layers)
        ]

    def region(self, layer: int, block_id: int, num_blocks: int = 1) -> memoryview:
        size = self.layout.region_bytes
        return memoryview(self.layers[layer])[block_id * size : (block_id + num_blocks) * size]

    def fill(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        for layer in self.layers:
            layer[:] = rng.randbytes(len(layer))

    def read(self, block_ids: Sequence[int]) -> list[list[bytes]]:
        """Bytes by layer, then logical block."""
        return [
            [bytes(self.region(layer, block)) for block in block_ids]
            for layer in range(self.layout.num_layers)
        ]


@dataclass
class Pair:
    """A source and a target that can reach each other."""

    source: KvSource
    target: KvTarget
    source_memory: FakeMemory
    target_memory: FakeMemory
    network: LoopbackNetwork
    target_id: str = "target-a"
    extra: list[KvSource] = field(default_factory=list)

    async def aclose(self) -> None:
        for source in (self.source, *self.extra):
            await source.aclose()
        await self.target.aclose()
        await self.network.aclose()
        assert self.source.stats().handoffs_active == 0
        assert self.target.stats().handoffs_active == 0


Clock = Callable[[], float]


def make_source(
    memory: FakeMemory,
    connect: Connect,
    instance_id: str = "source-a",
    digest: str = "digest",
    clock: Clock = time.monotonic,
) -> KvSource:
    return KvSource(instance_id, digest, memory.layout, memory, connect, clock)


def make_target(
    memory: FakeMemory, instance_id: str = "target-a", clock: Clock = time.monotonic
) -> KvTarget:
    return KvTarget(instance_id, "digest", memory.layout, memory, clock)


def make_pair(
    faults: Faults | None = None, layout: KvLayout = LAYOUT, clock: Clock = time.monotonic
) -> Pair:
    source_memory, target_memory = FakeMemory(layout), FakeMemory(layout)
    source_memory.fill()
    network = LoopbackNetwork(faults)
    source = make_source(source_memory, network.connect, clock=clock)
    target = make_target(target_memory, clock=clock)
    network.targets[ADDRESS] = target
    return Pair(source, target, source_memory, target_memory, network)


def mark_all(handoff: SourceHandoff, layout: KvLayout, num_tokens: int) -> None:
    for layer in range(layout.num_layers):
        handoff.layer_ready(layer, num_tokens)
