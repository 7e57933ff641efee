"""Workers in actors of a Ray that has several nodes and GPUs, all of them pretended."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from services.launch.actors import ActorInstance, RayLauncher
from services.launch.place import LaunchError
from services.runtime.settings import Role, WorkerConfig
from tests.services.worker.pair import TOKEN, Registry, router_of
from tests.tiny_model import make_tiny_model

ray = pytest.importorskip("ray", reason="needs the ray extra")
ENGINE = EngineConfig(dtype="float32", kv_cache_bytes=1 << 24, device="cpu")
ROOT = str(Path(__file__).resolve().parent.parent.parent.parent)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes with 2 CPUs and 2 GPUs each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setenv("KVRELAY_CLUSTER_TOKEN", TOKEN)
    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=80_000_000)
        ray.init(address=cluster.address, namespace="kvrelay", log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


async def test_pairs_share_a_node_and_each_gets_a_gpu(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.launch.actors.ROOM_S", 2.0)
    model = str(make_tiny_model(tmp_path / "tiny"))
    router = router_of(Registry())
    await router.start()
    pairs = [("prefill-0", "decode-0"), ("prefill-1", "decode-1")]
    launcher = RayLauncher(1, 1, joined=False, neighbours=[*pairs, ("decode-2",)])
    config = WorkerConfig(model, Role.DECODE, router.address, engine=ENGINE)
    placed: dict[str, ActorInstance] = {}

    async def place(name: str) -> None:
        role = Role(name.partition("-")[0])
        placed[name] = await launcher.place(name, replace(config, role=role))

    try:
        await asyncio.gather(*(place(name) for pair in pairs for name in pair))
        where = [{placed[name].node for name in pair} for pair in pairs]
        assert all(len(shared) == 1 for shared in where) and where[0] != where[1]
        # Each has a GPU of its own: on two nodes both count from zero.
        for pair in pairs:
            assert sorted(placed[name].devices for name in pair) == ["0", "1"]
        assert "CUDA_VISIBLE_DEVICES" not in os.environ

        with pytest.raises(LaunchError, match=r"no room for decode-2 .* 1 CPU and 1 GPU"):
            await place("decode-2")

        gone = placed["decode-1"]
        gone.kill()
        assert await gone.died()
        await place("decode-1")
        assert placed["decode-1"].addresses != gone.addresses
        assert (placed["decode-1"].node, placed["decode-1"].devices) == (gone.node, gone.devices)
    finally:
        await asyncio.gather(*(instance.stop(2) for instance in placed.values()))
        await launcher.close()
        await router.stop()
