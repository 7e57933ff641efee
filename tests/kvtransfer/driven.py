"""One handoff over loopback, driven step by step, and a transport that misbehaves to order."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from kvtransfer.errors import HandoffError
from kvtransfer.source import SourceHandoff
from kvtransfer.target import TargetHandoff
from kvtransfer.transports.loopback import Faults
from protos import kv_transfer_pb2 as pb
from tests.kvtransfer.fakes import ADDRESS, LAYOUT, Pair, mark_all, new_id

TOKENS = 3 * LAYOUT.block_size
SOURCE_BLOCKS, TARGET_BLOCKS = [4, 9, 2], [30, 31, 33]


class Script(Faults):
    """Drops control frames of some kinds once, and passes data through ``on_data``."""

    def __init__(
        self, drop: Sequence[str] = (), on_data: Callable[[bytes], Sequence[bytes]] | None = None
    ) -> None:
        self.drop = list(drop)
        self.on_data = on_data

    async def control(self, to_target: bool, frame: pb.ControlFrame) -> Sequence[pb.ControlFrame]:
        kind = frame.WhichOneof("frame")
        if kind in self.drop:
            self.drop.remove(kind)
            return ()
        return (frame,)

    async def data(self, message: bytes) -> Sequence[bytes]:
        return (message,) if self.on_data is None else self.on_data(message)


class Run:
    """One handoff, driven step by step."""

    def __init__(self, pair: Pair, blocks: Sequence[int] = TARGET_BLOCKS) -> None:
        self.pair = pair
        self.blocks = blocks
        handoff_id = new_id()
        self.landing: TargetHandoff = pair.target.expect(handoff_id, "r1")
        self.sending: SourceHandoff = pair.source.offer(
            handoff_id, ADDRESS, pair.target_id, "r1", TOKENS, [], SOURCE_BLOCKS
        )

    async def grant(self) -> None:
        await self.landing.offered()
        self.landing.grant(self.blocks, 0)
        await self.sending.granted()

    async def send_some(self) -> None:
        self.sending.layer_ready(0, TOKENS)
        while self.landing.num_bytes < 3 * LAYOUT.region_bytes:
            await asyncio.sleep(0)

    def send_all(self) -> None:
        mark_all(self.sending, LAYOUT, TOKENS)
        self.sending.first(TOKENS, 1)

    async def succeed(self) -> None:
        async with asyncio.timeout(10):
            await asyncio.gather(self.sending.released(), self.landing.landed())
        landed = self.pair.target_memory.read(self.blocks)
        assert landed == self.pair.source_memory.read(SOURCE_BLOCKS)

    async def fail(self, source: type[HandoffError], target: type[HandoffError]) -> list[str]:
        """Both ends must raise these, drain, and leave nothing behind; the two reasons."""
        async with asyncio.timeout(10):
            with pytest.raises(source) as at_source:
                await self.sending.released()
            with pytest.raises(target) as at_target:
                await self.landing.landed()
            await asyncio.gather(self.sending.drained(), self.landing.drained())
        return [str(at_source.value), str(at_target.value)]


async def up_to(run: Run, phase: str) -> None:
    """Bring a handoff to a phase: offered, granted, sending or sent."""
    if phase == "begun":
        return
    await run.landing.offered()
    if phase == "offered":
        return
    await run.grant()
    if phase in ("sending", "sent"):
        await run.send_some()
    if phase == "sent":
        mark_all(run.sending, LAYOUT, TOKENS)
        while run.landing.num_bytes < 3 * LAYOUT.block_bytes:
            await asyncio.sleep(0)


PHASES = ["begun", "offered", "granted", "sending", "sent"]
