"""What a cluster does when its parts come, go and fail."""

import asyncio

import pytest

from services.launch.place import LaunchError
from services.launch.supervise import Cluster, RestartPolicy
from services.runtime.settings import Role, RouterConfig
from tests.services.launch.fakes import FakeInstance, FakeLauncher, plan_of

AT_ONCE = RestartPolicy(first_pause_s=0.0, max_pause_s=0.0)


class World:
    """One cluster of fakes: a prefill and two decode instances."""

    def __init__(self) -> None:
        self.launcher = FakeLauncher()
        self.router = FakeInstance("router", self.launcher.log)
        self.up: list[str] = []
        self.cluster = Cluster(
            plan_of(Role.PREFILL, Role.DECODE, Role.DECODE),
            self.launcher,
            policy=AT_ONCE,
            start_router=self._start_router,
            on_up=self.up.append,
        )

    async def _start_router(self, name: str, config: RouterConfig) -> FakeInstance:
        return self.router

    def lives(self, name: str) -> list[FakeInstance]:
        return self.launcher.placed[name]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_starts_router_first_then_workers_that_know_it() -> None:
    world = World()
    assert await world.cluster.start() == world.router.addresses
    assert world.up[0] == "router"
    assert sorted(world.up[1:]) == ["decode-0", "decode-1", "prefill-0"]
    assert {config.router for config in world.launcher.configs} == {"127.0.0.1:7"}


async def test_stops_router_before_workers() -> None:
    world = World()
    await world.cluster.start()
    await world.cluster.stop(1.0)
    log = world.launcher.log
    assert log[:2] == ["stop router", "gone router"]
    assert set(log[2:-1]) == {
        f"{what} {name}" for what in ("stop", "gone") for name in world.launcher.placed
    }
    assert log[-1] == "close"


async def test_one_that_cannot_start_ends_the_start_with_its_reason() -> None:
    world = World()
    world.launcher.refusals["prefill-0"] = ["no such model"]
    world.launcher.slow = {"decode-0"}
    with pytest.raises(LaunchError, match=r"^prefill-0: no such model$"):
        await world.cluster.start()
    assert "cancelled decode-0" in world.launcher.log
    await world.cluster.stop(0.0)
    assert "gone decode-1" in world.launcher.log
    assert "gone router" in world.launcher.log


async def test_a_worker_that_died_is_started_again() -> None:
    world = World()
    await world.cluster.start()
    watching = asyncio.create_task(world.cluster.watch())
    world.lives("decode-1")[0].die("killed by SIGKILL")
    await settle()
    assert len(world.lives("decode-1")) == 2
    assert len(world.lives("decode-0")) == 1
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await world.cluster.stop(0.0)
    assert world.lives("decode-1")[1].dead.is_set()


async def test_a_worker_that_keeps_dying_ends_nothing_else() -> None:
    world = World()
    await world.cluster.start()
    watching = asyncio.create_task(world.cluster.watch())
    for life in range(9):
        await settle()
        world.lives("prefill-0")[life].die("out of memory")
    await settle()
    assert not watching.done()
    assert len(world.lives("prefill-0")) == 10
    assert not world.lives("decode-0")[0].dead.is_set()
    watching.cancel()


async def test_a_restart_that_fails_is_tried_again() -> None:
    world = World()
    await world.cluster.start()
    world.launcher.refusals["prefill-0"] = ["busy"] * 3
    watching = asyncio.create_task(world.cluster.watch())
    world.lives("prefill-0")[0].die("gone")
    await settle()
    assert len(world.lives("prefill-0")) == 2
    assert not watching.done()
    watching.cancel()


async def test_the_routers_death_ends_the_cluster() -> None:
    world = World()
    await world.cluster.start()
    watching = asyncio.create_task(world.cluster.watch())
    world.router.die("killed by SIGKILL")
    with pytest.raises(LaunchError, match=r"^router: killed by SIGKILL$"):
        await watching


async def test_kill_ends_a_stop_that_waits() -> None:
    world = World()
    await world.cluster.start()
    world.router.stops_by_itself = False
    stopping = asyncio.create_task(world.cluster.stop(60.0))
    await settle()
    assert not stopping.done()
    world.cluster.kill()
    await asyncio.wait_for(stopping, 1.0)


def test_pauses_grow_up_to_a_limit() -> None:
    policy = RestartPolicy(first_pause_s=0.5, max_pause_s=2.0)
    assert [policy.pause_s(n) for n in (0, 1, 2, 3, 4, 5000)] == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]


def test_neighbours_are_pairs_that_hand_over() -> None:
    P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
    assert plan_of(P, P, D, D, D, C).neighbours() == [
        ("prefill-0", "decode-0"),
        ("prefill-1", "decode-1"),
        ("decode-2",),
        ("colocated-0",),
    ]
    assert plan_of(C).neighbours() == [("colocated-0",)]
