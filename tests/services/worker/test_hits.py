"""Prompts around the ends of blocks, with what either side has of them already."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.config import EngineConfig
from engine.loaders.open import open_model
from engine.request import Request, SamplingParams
from engine.runner import Runner
from services.runtime.settings import Role, WorkerConfig
from services.worker.app import Worker
from tests.engine.runner_bench import Bench
from tests.services.worker.pair import TOKEN, Pair, Registry, router_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE = EngineConfig(dtype="float32", block_size=16, kv_cache_bytes=1 << 22)
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def runner(tiny_model: Path) -> Runner:
    return Runner(ENGINE, open_model(str(tiny_model)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tiny_model: Path) -> AsyncIterator[Pair]:
    patch = pytest.MonkeyPatch()
    patch.setenv("KVRELAY_CLUSTER_TOKEN", TOKEN)
    registry = Registry()
    router = router_of(registry)
    await router.start()
    prefill, decode = workers = [
        Worker(WorkerConfig(str(tiny_model), role, router.address, engine=ENGINE))
        for role in (Role.PREFILL, Role.DECODE)
    ]
    for worker in workers:
        await worker.start()
    built = Pair(prefill, decode, registry)
    yield built
    await built.nothing_held(2)
    await built.close()
    for worker in workers:
        await worker.stop()
    await router.stop()
    patch.undo()


def undisturbed(runner: Runner, ids: list[int]) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    sampled = Bench(runner).run(Request("r", tuple(ids), sampling))["r"]
    return [each.token_id for each in sampled]


async def ask(pair: Pair, ids: list[int], handoff: bool) -> tuple[list[int], int]:
    """The answer, and how many prompt tokens nobody computed for it."""
    request_id = await pair.start(ids, NUM_TOKENS, handoff=handoff)
    told, end = await pair.answer(request_id)
    if handoff:
        for _ in range(2):
            event = await asyncio.wait_for(pair.prefill_leg.events.get(), 5)
        assert event.HasField("done"), event
    return [*told, *end.finished.last.token_ids], end.finished.cached_tokens


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("where", ["decode", "both"])
async def test_every_hit_on_either_side_is_exact(
    pair: Pair, runner: Runner, length: int, share: float, where: str
) -> None:
    ids = random.Random(f"{length} {share} {where}").choices(range(250), k=length)
    known = int(length * share)
    if known:
        await ask(pair, ids[:known], handoff=where == "both")
    expected = undisturbed(runner, ids)
    answer, cached = await ask(pair, ids, handoff=True)
    assert answer == expected
    # Full blocks of what was read before, never the last token.
    assert cached == (min(known, length - 1) // 16 * 16 if where == "both" else 0)
    again, cached = await ask(pair, ids, handoff=True)
    assert (again, cached) == (expected, (length - 1) // 16 * 16)
