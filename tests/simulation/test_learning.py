"""What the router learns from requests that wait for the same instance."""

import asyncio

import pytest

from engine.request import Request, SamplingParams
from services.runtime.settings import PlacementPolicy
from tests.simulation.cluster import Cluster
from tests.simulation.loop import VirtualLoop
from tests.simulation.runs import bury
from tests.simulation.scenario import Ask, Rates, Scenario

NUM_PROMPTS, NUM_TOKENS = 16, 64


def test_a_queue_is_not_taken_for_slowness() -> None:
    """Each prompt waits for all before it; what is learned is what one takes alone."""
    asks = tuple(
        Ask(
            Request(
                f"q{i}",
                tuple(97 + (i + k) % 26 for k in range(NUM_TOKENS)),
                SamplingParams(0.0, max_tokens=4),
            ),
            0.0,
        )
        for i in range(NUM_PROMPTS)
    )
    calm = Scenario(0, 1, 1, PlacementPolicy.COST, 256, 64, asks, (), Rates())
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    cluster = Cluster(calm, loop)
    try:
        loop.run_until_complete(cluster.run())
        rates = cluster.router.serving.rates
        assert rates.are_known
    finally:
        bury(cluster, loop)
        asyncio.set_event_loop(None)
        loop.close()
    alone_s = 0.004 + NUM_TOKENS * 0.0002
    assert rates.prefill_s(NUM_TOKENS) == pytest.approx(alone_s, rel=0.4)
    assert rates.queue_s(NUM_PROMPTS, NUM_PROMPTS * NUM_TOKENS) < 2 * NUM_PROMPTS * alone_s
