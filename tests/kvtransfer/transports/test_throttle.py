"""A throttled line takes the time it says, and latency costs no bandwidth."""

import asyncio
import time

from kvtransfer.layout import KvLayout
from kvtransfer.transports.loopback import LoopbackNetwork
from kvtransfer.transports.throttle import Throttle, throttled
from tests.kvtransfer.rig import rig

LAYOUT = KvLayout("float32", num_layers=16, num_kv_heads=2, head_dim=64, block_size=16)
HANDOFF_BYTES = 32 * LAYOUT.block_bytes


async def seconds(throttle: Throttle, handoffs: int = 1) -> float:
    async with rig("throttled", LAYOUT, 32 * handoffs, throttle) as pair:
        begin_s = time.monotonic()
        await asyncio.gather(
            *(
                pair.hand_over(blocks, blocks, [32 * LAYOUT.block_size])
                for blocks in (range(32 * i, 32 * i + 32) for i in range(handoffs))
            )
        )
        assert pair.landed.layers == pair.sent.layers
        return time.monotonic() - begin_s


async def test_handoffs_share_the_bandwidth() -> None:
    """Less what an idle line may catch up."""
    bytes_per_s = HANDOFF_BYTES / 0.1
    assert await seconds(Throttle(bytes_per_s)) >= 0.09
    assert await seconds(Throttle(bytes_per_s), handoffs=3) >= 0.29


async def test_everything_is_late_by_the_latency_once() -> None:
    taken_s = await seconds(Throttle(latency_s=0.1))
    assert taken_s >= 0.3, "Hello, OFFER and the bytes each cross once, one after the other"
    assert taken_s < 1.2, "sixteen frames do not wait for one another"


def test_no_throttle_is_no_wrapper() -> None:
    network = LoopbackNetwork()
    connect = network.connect
    assert throttled(connect, Throttle()) is connect
