"""A cluster on its way up, while it lives, and down again.

    1  start    the router first, then all workers at once; the first that cannot start ends it all
    2  watch    a worker that dies is started again, as a new instance, after a pause that grows
                as long as it keeps dying: the others serve meanwhile; the router's death ends the
                cluster with the reason
    3  scale    more instances come, or those with the highest numbers drain and go
    4  stop     the router drains and goes, then the workers; whoever is late is killed

Knows nothing of requests or models, nor how a worker is placed. Called by ``services.cli``.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.launch.place import Instance, Launcher, LaunchError
from services.launch.processes import ChildProcess
from services.runtime.errors import InvalidArgument, Unavailable
from services.runtime.settings import Role, RouterConfig, WorkerConfig

log = logging.getLogger(__name__)

MAX_INSTANCES = 256
LEAVE_S = 35.0
"""What an instance is given to drain and go; a little more than its own drain timeout."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What a cluster is made of."""

    router: RouterConfig
    worker_for: Callable[[str, str], WorkerConfig]
    """(role, the router's internal address) -> the config of a worker."""
    roles: tuple[str, ...]
    """One entry a worker."""

    def names(self) -> list[tuple[str, str]]:
        """(name, role) of every worker: ``prefill-0``, ``prefill-1``, ``decode-0``."""
        counts: dict[str, int] = {}
        named = []
        for role in self.roles:
            named.append((f"{role}-{counts.setdefault(role, 0)}", role))
            counts[role] += 1
        return named

    def neighbours(self) -> list[tuple[str, ...]]:
        """Names of workers that should be close to each other: the first prefill with the first
        decode instance and so on, as they hand over KV; all others alone."""
        by_role: dict[str, list[str]] = {}
        for name, role in self.names():
            by_role.setdefault(role, []).append(name)
        prefill, decode = by_role.pop(Role.PREFILL, []), by_role.pop(Role.DECODE, [])
        pairs = itertools.zip_longest(prefill, decode)
        together = [tuple(name for name in pair if name) for pair in pairs]
        return together + [(name,) for names in by_role.values() for name in names]


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a worker that died is started again."""

    first_pause_s: float = 0.2
    max_pause_s: float = 30.0
    quick_s: float = 10.0
    """A death sooner than this after it was ready counts as another in a row."""

    def pause_s(self, quick_deaths: int) -> float:
        """Seconds to wait after that many quick deaths in a row."""
        doublings = min(max(0, quick_deaths - 1), 32)
        return min(self.max_pause_s, self.first_pause_s * 2.0**doublings)


def check_counts(goal: Mapping[Role, int]) -> None:
    """Raises: InvalidArgument: such a cluster could not answer, or would be too large."""
    for role, count in goal.items():
        if not 0 <= count <= MAX_INSTANCES:
            raise InvalidArgument(f"--{role}", f"{count} is not 0 to {MAX_INSTANCES}")
    if not (goal[Role.DECODE] or goal[Role.COLOCATED]):
        raise InvalidArgument("--decode", "prefill alone answers nobody: leave at least 1")


def changes(
    roles: Mapping[str, str], goal: Mapping[Role, int]
) -> tuple[list[tuple[str, str]], list[str]]:
    """From the instances by name and role to ``goal``: (name, role) of those to add, names of
    those to remove. Free numbers are taken from the lowest, and given up from the highest."""
    more: list[tuple[str, str]] = []
    fewer: list[str] = []
    for role, count in goal.items():
        numbers = sorted(int(name.rpartition("-")[2]) for name, has in roles.items() if has == role)
        free = (number for number in itertools.count() if number not in numbers)
        missing = max(0, count - len(numbers))
        more += [(f"{role}-{number}", role) for number in itertools.islice(free, missing)]
        fewer += [f"{role}-{number}" for number in numbers[count:]]
    return more, fewer


StartRouter = Callable[[str, RouterConfig], Coroutine[Any, Any, Instance]]


class Cluster:
    """A router and its workers. ``start``, then ``watch`` until told otherwise, then ``stop``."""

    def __init__(
        self,
        plan: ClusterPlan,
        launcher: Launcher,
        *,
        policy: RestartPolicy | None = None,
        start_router: StartRouter = ChildProcess.start,
        on_up: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._plan = plan
        self._launcher = launcher
        self._policy = policy or RestartPolicy()
        self._start_router = start_router
        self._on_up = on_up
        self._router: Instance | None = None
        self._workers: dict[str, Instance] = {}
        self._roles: dict[str, str] = dict(plan.names())
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._over: asyncio.Future[None] | None = None
        self._scaling: asyncio.Task[None] | None = None

    async def start(self) -> Mapping[str, str]:
        """Bring everything up; the router's addresses by server name.

        Raises:
            LaunchError: something could not start. ``stop`` is still to be called.
        """
        self._router = await self._start_router("router", self._plan.router)
        self._on_up("router")
        await self._all(self._place(name, role) for name, role in self._plan.names())
        return self._router.addresses

    async def watch(self) -> None:
        """Restart what dies. Returns never.

        Raises:
            LaunchError: the router died.
        """
        self._over = asyncio.get_running_loop().create_future()
        router = asyncio.create_task(self._router_died())
        router.add_done_callback(self._ended)
        for name, role in self._roles.items():
            self._keepers[name] = self._keeper(name, role)
        try:
            await self._over
        finally:
            tasks = [router, *self._keepers.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def scale(self, counts: Mapping[Role, int]) -> None:
        """Have so many instances of these roles; those that are too many drain first. Goes on
        when the caller does not wait.

        Raises:
            InvalidArgument: such a cluster could not answer, or would be too large.
            Unavailable: it is not up yet, or scales already.
            LaunchError: a new instance could not start; the others are there.
        """
        if self._over is None or (self._scaling is not None and not self._scaling.done()):
            raise Unavailable("the cluster starts or scales just now: ask again in a moment")
        goal = {role: list(self._roles.values()).count(role) for role in Role} | dict(counts)
        check_counts(goal)
        self._scaling = asyncio.create_task(self._scale(goal), name="scale")
        await asyncio.shield(self._scaling)

    async def stop(self, drain_s: float) -> None:
        """Stop everything in order. ``drain_s``: what the requests in flight are given."""
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.gather(self._scaling, return_exceptions=True)
        if self._router is not None:
            # The router ends its drain by itself; the rest is for its way out.
            await self._router.stop(drain_s + 2.0)
        await asyncio.gather(*(worker.stop(2.0) for worker in self._workers.values()))
        await self._launcher.close()

    def kill(self) -> None:
        """End everything at once; a ``stop`` under way returns soon."""
        for instance in filter(None, [self._router, *self._workers.values()]):
            instance.kill()

    async def _all(self, jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run jobs together; the first failure cancels the others and is raised."""
        tasks = [asyncio.ensure_future(job) for job in jobs]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _scale(self, goal: Mapping[Role, int]) -> None:
        more, fewer = changes(self._roles, goal)
        # First the new ones, so that what runs on the others has where to go.
        results = await asyncio.gather(
            *(self._add(name, role) for name, role in more), return_exceptions=True
        )
        await asyncio.gather(*(self._remove(name) for name in fewer))
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _add(self, name: str, role: str) -> None:
        try:
            await self._place(name, role)
        except LaunchError:
            self._launcher.forget(name)
            raise
        self._roles[name] = role
        self._keepers[name] = self._keeper(name, role)

    async def _remove(self, name: str) -> None:
        del self._roles[name]
        keeper = self._keepers.pop(name)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await self._workers[name].stop(LEAVE_S)
        del self._workers[name]
        self._launcher.forget(name)

    def _keeper(self, name: str, role: str) -> "asyncio.Task[None]":
        keeper = asyncio.create_task(self._keep(name, role), name=f"keep {name}")
        keeper.add_done_callback(self._ended)
        return keeper

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """A task that should go on for ever did not: ``watch`` raises why."""
        assert self._over is not None
        if not task.cancelled() and (error := task.exception()) and not self._over.done():
            self._over.set_exception(error)

    async def _place(self, name: str, role: str) -> None:
        assert self._router is not None
        config = self._plan.worker_for(role, self._router.addresses["internal"])
        self._workers[name] = await self._launcher.place(name, config)
        self._on_up(name)

    async def _router_died(self) -> None:
        assert self._router is not None
        raise LaunchError(f"router: {await self._router.died()}")

    async def _keep(self, name: str, role: str) -> None:
        quick_deaths = 0
        reason, lived_s = await self._watch(name)
        while True:
            quick_deaths = quick_deaths + 1 if lived_s < self._policy.quick_s else 1
            pause_s = self._policy.pause_s(quick_deaths)
            log.warning("%s: %s; starting it again in %.1f s", name, reason, pause_s)
            await asyncio.sleep(pause_s)
            try:
                await self._place(name, role)
            except LaunchError as error:
                reason, lived_s = str(error), 0.0
            else:
                reason, lived_s = await self._watch(name)

    async def _watch(self, name: str) -> tuple[str, float]:
        """How a worker that is up ended, and after how many seconds."""
        up_s = time.monotonic()
        reason = await self._workers[name].died()
        return reason, time.monotonic() - up_s
