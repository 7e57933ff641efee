"""What a cluster does when its parts come, go and fail."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launch.place import LaunchError
from services.launch.supervise import Cluster, RestartPolicy, changes
from services.runtime.errors import InvalidArgument, Unavailable
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


async def up_and_watched(world: World) -> "asyncio.Task[None]":
    await world.cluster.start()
    watching = asyncio.create_task(world.cluster.watch())
    await settle()
    return watching


async def ended(watching: "asyncio.Task[None]") -> None:
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_scale_adds_before_it_removes_and_keeps_what_is_new() -> None:
    world = World()
    watching = await up_and_watched(world)
    await world.cluster.scale({Role.PREFILL: 3, Role.DECODE: 1})
    assert {"prefill-1", "prefill-2"} <= set(world.launcher.placed)
    assert world.launcher.log == ["stop decode-1", "gone decode-1", "forget decode-1"]
    world.lives("prefill-2")[0].die("shot")
    world.lives("decode-1")[0].die("nobody cares")
    await settle()
    assert len(world.lives("prefill-2")) == 2 and len(world.lives("decode-1")) == 1
    await world.cluster.scale({Role.DECODE: 2})
    assert len(world.lives("decode-1")) == 2
    await ended(watching)
    await world.cluster.stop(1.0)
    assert world.launcher.log.count("stop decode-1") == 2


async def test_scale_while_one_is_started_again() -> None:
    world = World()
    watching = await up_and_watched(world)
    world.launcher.slow.add("decode-1")
    world.lives("decode-1")[0].die("shot")
    await settle()
    await world.cluster.scale({Role.DECODE: 1})
    assert "cancelled decode-1" in world.launcher.log
    assert not watching.done()
    await ended(watching)


async def test_what_cannot_start_is_told_and_forgotten() -> None:
    world = World()
    world.launcher.refusals["prefill-1"] = ["no room"]
    watching = await up_and_watched(world)
    with pytest.raises(LaunchError, match="prefill-1: no room"):
        await world.cluster.scale({Role.PREFILL: 3})
    assert "forget prefill-1" in world.launcher.log and world.lives("prefill-2")
    await world.cluster.scale({Role.PREFILL: 3})
    assert len(world.lives("prefill-1")) == len(world.lives("prefill-2")) == 1
    await ended(watching)


@pytest.mark.parametrize(
    ("counts", "named"),
    [({Role.DECODE: 0}, "--decode"), ({Role.PREFILL: 257}, "--prefill: 257 is not 0 to 256")],
)
async def test_scale_refuses_what_could_not_answer(counts: dict[Role, int], named: str) -> None:
    world = World()
    watching = await up_and_watched(world)
    with pytest.raises(InvalidArgument, match=named):
        await world.cluster.scale(counts)
    await ended(watching)


async def test_scale_waits_for_its_turn() -> None:
    world = World()
    with pytest.raises(Unavailable, match="starts or scales"):
        await world.cluster.scale({Role.DECODE: 3})
    watching = await up_and_watched(world)
    world.launcher.slow.add("decode-2")
    first = asyncio.create_task(world.cluster.scale({Role.DECODE: 3}))
    await settle()
    with pytest.raises(Unavailable, match="starts or scales"):
        await world.cluster.scale({Role.DECODE: 4})
    await ended(watching)
    await world.cluster.stop(1.0)
    assert "cancelled decode-2" in world.launcher.log
    await asyncio.gather(first, return_exceptions=True)


@given(
    now=st.dictionaries(st.sampled_from(Role), st.sets(st.integers(0, 6), max_size=4)),
    goal=st.dictionaries(st.sampled_from(Role), st.integers(0, 6)),
)
def test_changes_lead_to_the_goal(now: dict[Role, set[int]], goal: dict[Role, int]) -> None:
    roles = {f"{role}-{n}": role.value for role, numbers in now.items() for n in numbers}
    more, fewer = changes(roles, goal)
    assert not (set(fewer) - roles.keys()) and not ({name for name, _ in more} & roles.keys())
    after = {name: role for name, role in (roles | dict(more)).items() if name not in fewer}
    for role in Role:
        assert list(after.values()).count(role) == goal.get(role, len(now.get(role, ())))
    assert not (more and fewer) or len(goal) > 1
