"""The replay: every request ends, blocks come back, and knowing caches is worth something."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.placement import at_load, read_trace
from benchmarks.placement_world import TimeModel, World
from services.router.disaggregation import Rules
from services.runtime.settings import PlacementPolicy

TIMES = TimeModel(6e-4, 1e-7, 3.5e-3, 9e-4, 1e-5)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of growing length, mixed: what a turn has before it is cached somewhere."""
    rng, path = random.Random(1), tmp_path_factory.mktemp("trace") / "trace.jsonl"
    talks = [[n * 1000] for n in range(12)]
    with path.open("w") as lines:
        for number in range(120):
            talk = rng.choice(talks)
            talk += range(talk[-1] + 1, talk[-1] + 5)
            ids = talk[-60:] if len(talk) < 60 else talk[:60]
            entry = {
                "timestamp": number * 500,
                "input_length": len(ids) * 512 - 100,
                "output_length": rng.randint(32, 600),
                "hash_ids": ids,
            }
            lines.write(json.dumps(entry) + "\n")
    return path


def replay(trace: Path, policy: PlacementPolicy) -> World:
    world = World(Rules(0, policy), TIMES, 3, 2, 600)
    world.replay(at_load(read_trace(str(trace), 120), 1.2, 3, TIMES.token_s))
    return world


@pytest.mark.parametrize("policy", PlacementPolicy)
def test_every_request_ends_and_leaves_nothing(trace: Path, policy: PlacementPolicy) -> None:
    world = replay(trace, policy)
    assert len({asked.request.request_id for asked in world.done}) == 120
    for asked in world.done:
        assert asked.ttft_s > 0
        assert 1 + len(asked.gaps_s) == asked.request.sampling.max_tokens
    for instance in world.instances.values():
        instance.core.check_integrity()
        assert instance.kv.stats().held == 0 and not instance.placed


def test_knowing_caches_is_worth_something(trace: Path) -> None:
    def mean_ttft_s(policy: PlacementPolicy) -> float:
        return sum(asked.ttft_s for asked in replay(trace, policy).done) / 120

    blind = mean_ttft_s(PlacementPolicy.RANDOM)
    for policy in (PlacementPolicy.LOCAL_PREFIX, PlacementPolicy.COST):
        assert mean_ttft_s(policy) < 0.8 * blind
