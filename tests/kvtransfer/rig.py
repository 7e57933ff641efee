"""A source and a target over any transport, with the faults that every transport can be given."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from kvtransfer.layout import KvLayout
from kvtransfer.source import KvSource, SourceHandoff
from kvtransfer.target import KvTarget, TargetHandoff
from kvtransfer.transports.interface import Connect, Link
from kvtransfer.transports.loopback import LoopbackNetwork
from kvtransfer.transports.mounted import add_kv_transfer_to_server
from kvtransfer.transports.remote import (
    SERVER_OPTIONS,
    RemoteConnector,
)
from kvtransfer.transports.throttle import Throttle, throttled
from tests.kvtransfer.fakes import (
    ADDRESS,
    LAYOUT,
    FakeMemory,
    make_source,
    make_target,
    mark_all,
    new_id,
)

TRANSPORTS = ("loopback", "grpc", "shared_memory", "throttled")
"""throttled: any of them behind a line of some speed and latency."""
SLOW = Throttle(200e6, 0.002)


@dataclass
class Rig:
    """Both ends, the source's links, and where it dials."""

    source: KvSource
    target: KvTarget
    sent: FakeMemory
    landed: FakeMemory
    address: str
    links: list[Link] = field(default_factory=list)

    async def cut(self) -> None:
        """The connection breaks under both ends."""
        for link in self.links:
            await link.close()
        self.links.clear()

    async def offered(self) -> tuple[SourceHandoff, TargetHandoff]:
        """Both ends of a handoff of two blocks that the target has heard of."""
        handoff_id = new_id()
        landing = self.target.expect(handoff_id, "r")
        sending = self.source.offer(handoff_id, self.address, "target-a", "r", 8, [], [0, 1])
        await landing.offered()
        return sending, landing

    async def granted(self) -> tuple[SourceHandoff, TargetHandoff]:
        """The same, granted: it will lie in blocks 5 and 6."""
        sending, landing = await self.offered()
        landing.grant([5, 6], 0)
        await sending.granted()
        return sending, landing

    async def hand_over(
        self, source_blocks: Sequence[int], target_blocks: Sequence[int], chunks: Sequence[int]
    ) -> None:
        """One handoff of ``chunks[-1]`` tokens, from start to end."""
        handoff_id = new_id()
        landing = self.target.expect(handoff_id, "r")
        sending = self.source.offer(
            handoff_id, self.address, "target-a", "r", chunks[-1], [], source_blocks
        )
        await landing.offered()
        landing.grant(target_blocks, 0)
        await sending.granted()
        for num_tokens in chunks:
            mark_all(sending, self.source.layout, num_tokens)
            await asyncio.sleep(0)
        sending.first(chunks[-1], 7)
        await asyncio.gather(sending.released(), landing.landed())

    async def hand_over_any(self, seed: int, num_blocks: int) -> None:
        """A handoff of ``num_blocks`` blocks that lie anywhere; its bytes are compared."""
        draw = random.Random(seed)
        everything = range(len(self.sent.layers[0]) // self.sent.layout.region_bytes)
        sources, targets = draw.sample(everything, num_blocks), draw.sample(everything, num_blocks)
        num_tokens = num_blocks * self.sent.layout.block_size - draw.randrange(2)
        cut = draw.randint(1, num_tokens)
        await self.hand_over(sources, targets, sorted({cut, num_tokens}))
        assert self.landed.read(targets) == self.sent.read(sources)


def _noting(connect: Connect, links: list[Link]) -> Connect:
    async def dial(address: str, source_instance_id: str, target_instance_id: str) -> Link:
        link = await connect(address, source_instance_id, target_instance_id)
        links.append(link)
        return link

    return dial


@asynccontextmanager
async def rig(
    transport: str,
    layout: KvLayout = LAYOUT,
    num_blocks: int = 64,
    throttle: Throttle = SLOW,
) -> AsyncIterator[Rig]:
    """A rig over ``transport``; at its end nothing may be left of any handoff."""
    sent, landed = FakeMemory(layout, num_blocks), FakeMemory(layout, num_blocks)
    sent.fill()
    target, links = make_target(landed), list[Link]()
    network, server = LoopbackNetwork(), None
    connect: Connect = network.connect
    address = ADDRESS
    network.targets[ADDRESS] = target
    if transport not in ("loopback", "throttled"):
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_kv_transfer_to_server(target, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        connect = RemoteConnector(transport=transport)
        await server.start()
    if transport == "throttled":
        connect = throttled(connect, throttle)
    source = make_source(sent, _noting(connect, links))
    try:
        yield Rig(source, target, sent, landed, address, links)
        await source.aclose()
        await target.aclose()
        assert source.stats().handoffs_active == target.stats().handoffs_active == 0
    finally:
        await network.aclose()
        if server is not None:
            await server.stop(0)
