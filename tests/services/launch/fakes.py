"""Services that exist only as objects, and a launcher that places them."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.launch.place import LaunchError
from services.launch.supervise import ClusterPlan
from services.runtime.settings import Role, RouterConfig, WorkerConfig


@dataclass
class FakeInstance:
    """Lives until ``die``, ``stop`` or ``kill``; writes what happens to it into a shared log."""

    name: str
    log: list[str]
    stops_by_itself: bool = True
    addresses: Mapping[str, str] = field(default_factory=lambda: {"internal": "127.0.0.1:7"})
    reason: str = ""
    dead: asyncio.Event = field(default_factory=asyncio.Event)

    def die(self, reason: str) -> None:
        self.reason = reason
        self.dead.set()

    async def died(self) -> str:
        await self.dead.wait()
        return self.reason

    async def stop(self, grace_s: float) -> None:
        self.log.append(f"stop {self.name}")
        if self.stops_by_itself:
            self.die("stopped")
        await self.dead.wait()
        self.log.append(f"gone {self.name}")

    def kill(self) -> None:
        self.log.append(f"kill {self.name}")
        self.die("killed")


@dataclass
class FakeLauncher:
    """Places fake instances; ``refusals`` are raised first, by name."""

    log: list[str] = field(default_factory=list)
    placed: dict[str, list[FakeInstance]] = field(default_factory=dict)
    configs: list[WorkerConfig] = field(default_factory=list)
    refusals: dict[str, list[str]] = field(default_factory=dict)
    slow: set[str] = field(default_factory=set)

    async def place(self, name: str, config: WorkerConfig) -> FakeInstance:
        try:
            await asyncio.sleep(60 if name in self.slow else 0)
        except asyncio.CancelledError:
            self.log.append(f"cancelled {name}")
            raise
        if self.refusals.get(name):
            raise LaunchError(f"{name}: {self.refusals[name].pop(0)}")
        self.configs.append(config)
        instance = FakeInstance(name, self.log)
        self.placed.setdefault(name, []).append(instance)
        return instance

    def forget(self, name: str) -> None:
        self.log.append(f"forget {name}")

    async def close(self) -> None:
        self.log.append("close")


def plan_of(*roles: Role) -> ClusterPlan:
    def worker_for(role: str, address: str) -> WorkerConfig:
        return WorkerConfig(model="demo", role=Role(role), router=address)

    return ClusterPlan(RouterConfig(model="demo"), worker_for, roles)
