"""``--launcher ray`` over three nodes, all on this machine: one of them is lost under load."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import eventually, serve
from tests.e2e.test_membership import WAYS, Load

pytest.importorskip("ray", reason="needs the ray extra")

ROOT = str(Path(__file__).resolve().parent.parent.parent)
# Ray's own word on a lost node, sooner than its default of 17 s: until then it would put the next
# actor there.
NOTICE = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
BACK_S = 10.0


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Three nodes with room for two instances each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", ROOT)
    cluster = Cluster()
    try:
        for number in range(3):
            head = {} if number else {"_system_config": NOTICE}
            cluster.add_node(num_cpus=2, object_store_memory=80_000_000, **head)
        yield cluster
    finally:
        cluster.shutdown()


def instances_on(node: Any) -> int:
    """Actors of ours that run on a node."""
    (raylet,) = node.all_processes["raylet"]
    children = psutil.Process(raylet.process.pid).children(recursive=True)
    return sum(child.name().startswith("ray::WorkerActor") for child in children)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.filterwarnings("ignore:::ray")
def test_a_node_is_lost_under_load(nodes: Any, tiny_model: Path) -> None:
    options = ["--prefill", "2", "--decode", "2", "--disaggregate-from", "0"]
    options += ["--dtype", "float32", "--kv-cache-bytes", "64MiB"]
    options += ["--launcher", "ray", "--ray-address", nodes.address, "--insecure"]
    with serve(str(tiny_model), *options) as cluster:
        undisturbed = [cluster.generate(**way) for way in WAYS]
        assert undisturbed[0].finished is not None
        assert undisturbed[0].finished.timeline.handoff_bytes > 0
        before = {each["instance_id"] for each in cluster.status()}
        lost = next(node for node in nodes.worker_nodes if instances_on(node))
        num_lost = instances_on(lost)
        with Load(cluster, undisturbed).during():
            nodes.remove_node(lost, allow_graceful=False)
            lost_at_s = time.monotonic()
            eventually(
                lambda: (
                    cluster.all_ready(4)
                    and len({i["instance_id"] for i in cluster.status()} - before) == num_lost
                ),
                BACK_S,
                "as many instances as before",
            )
            print(f"capacity is back after {time.monotonic() - lost_at_s:.1f} s")
        assert len(cluster.instances("prefill")) == len(cluster.instances("decode")) == 2
        eventually(cluster.held_nothing, 3, "nothing held")


@pytest.mark.slow
def test_other_machines_need_a_word(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from services.cli.main import run

    arguments = ["serve", str(tiny_model), "--launcher", "ray", "--ray-address", "10.0.0.1:6379"]
    assert run(arguments) == 1
    assert "--ray-address: between machines there is no encryption" in capfd.readouterr().err
