"""A real cluster and the demo model: greedy float32 answers equal ``transformers``, exactly."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Cluster, eventually, serve

PATH = Path(__file__).parent.parent / "goldens" / "smollm2_greedy_float32.json"
GOLDENS: list[dict[str, Any]] = json.loads(PATH.read_text("utf-8"))
CLUSTERS = {
    "disaggregated": ("--prefill", "1", "--decode", "1", "--disaggregate-from", "0"),
    "colocated": ("--colocated", "1"),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=CLUSTERS)
def demo(request: pytest.FixtureRequest) -> Iterator[tuple[str, Cluster]]:
    options = (*CLUSTERS[request.param], "--dtype", "float32", "--kv-cache-bytes", "512MiB")
    with serve("demo", *options) as running:
        yield request.param, running
        eventually(running.held_nothing, 3, "everything free after the tests")


def check(kind: str, cluster: Cluster, golden: dict[str, Any]) -> None:
    answer = cluster.generate(ids=golden["prompt_token_ids"], max_tokens=64, ignore_eos=True)
    expected = golden["output_token_ids"]
    if answer.token_ids != expected:
        assert len(answer.token_ids) == len(expected), golden["name"]
        pairs = zip(answer.token_ids, expected, strict=True)
        at = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
        gap = golden["gaps"][at]
        pytest.fail(f"{golden['name']}: differs at {at}, where the top two are {gap} apart")
    assert answer.finished is not None
    assert bool(answer.finished.timeline.prefill_instance) == (kind == "disaggregated")


def test_one_after_the_other(demo: tuple[str, Cluster]) -> None:
    for golden in GOLDENS:
        check(*demo, golden)


def test_eight_at_once(demo: tuple[str, Cluster]) -> None:
    """A second time around, so that prefixes are cached on both sides."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda golden: check(*demo, golden), GOLDENS))


def test_a_chat_is_answered_in_english(demo: tuple[str, Cluster]) -> None:
    kind, cluster = demo
    answer = cluster.generate(chat=[("user", "What is the capital of France?")], max_tokens=40)
    assert "Paris" in answer.text
    assert answer.finished is not None
    assert bool(answer.finished.timeline.prefill_instance) == (kind == "disaggregated")
