"""``--launcher ray``: the same worker inside Ray actors, on two CPUs."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import Cluster, eventually, serve

pytest.importorskip("ray", reason="needs the ray extra")

OPTIONS = ("--disaggregate-from", "0", "--dtype", "float32", "--kv-cache-bytes", "64MiB")


def kill_an_actor(cluster: Cluster) -> None:
    """SIGKILL the process of one actor."""
    for child in psutil.Process(cluster.process.pid).children(recursive=True):
        if child.name().startswith("ray::WorkerActor"):
            os.kill(child.pid, signal.SIGKILL)
            return
    raise AssertionError("no actor process")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_cluster_of_actors(tiny_model: Path) -> None:
    prompt = list(range(100))
    with serve(str(tiny_model), *OPTIONS) as local:
        expected = local.generate(ids=prompt, max_tokens=8, ignore_eos=True).token_ids

    with serve(str(tiny_model), "--launcher", "ray", *OPTIONS) as cluster:
        answer = cluster.generate(ids=prompt, max_tokens=8, ignore_eos=True)
        assert answer.token_ids == expected
        assert answer.finished is not None
        assert answer.finished.timeline.prefill_instance
        assert answer.finished.timeline.handoff_bytes > 0
        eventually(cluster.held_nothing, 2, "nothing held")

        before = {instance["instance_id"] for instance in cluster.status()}
        kill_an_actor(cluster)
        eventually(
            lambda: (
                len(now := cluster.status()) == 2
                and {i["instance_id"] for i in now} != before
                and cluster.all_ready(2)
            ),
            40,
            "a new instance in place of the killed one",
        )
        assert cluster.generate(ids=prompt, max_tokens=8, ignore_eos=True).token_ids == expected
