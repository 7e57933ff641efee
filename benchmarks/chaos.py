"""What happens to the instances of a running cluster, one thing at a time, for ``benchmarks.soak``.

Each strike waits until all instances are ready, does one thing and undoes what does not heal by
itself. Two workers, one of each role, are spared from signals.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter

import psutil

from benchmarks.memory import workers
from benchmarks.started import Started
from protos import cluster_pb2, cluster_pb2_grpc
from services.cli import operate
from services.runtime.settings import Role

NUM_INSTANCES = 4
READY_S = 60.0
STOPPED_S = 5.0
"""Longer than a silence that makes a router give an instance up."""
LASTS_S = 2.0
"""A drain, or another role."""


async def all_ready(status: cluster_pb2_grpc.StatusStub) -> list[cluster_pb2.InstanceStatus]:
    """The instances, once all are ready.

    Raises:
        SystemExit: one did not come back.
    """
    until_s = time.monotonic() + READY_S
    while True:
        answer = await status.GetStatus(cluster_pb2.GetStatusRequest())
        instances = [each for each in answer.instances if each.state == "ready"]
        if len(instances) == len(answer.instances) == NUM_INSTANCES:
            return instances
        if time.monotonic() > until_s:
            states = [f"{each.instance_id} {each.state}" for each in answer.instances]
            raise SystemExit(f"not all ready within {READY_S:g} s: {', '.join(states)}")
        await asyncio.sleep(0.2)


class Chaos:
    """Strikes a cluster."""

    def __init__(
        self, running: Started, status: cluster_pb2_grpc.StatusStub, dice: random.Random
    ) -> None:
        self._running = running
        self._status = status
        self._dice = dice
        names = {name: pid for pid, name in sorted(workers(running.pid).items(), reverse=True)}
        self._spared = set(names.values())
        self.struck: Counter[str] = Counter()

    async def strike(self) -> None:
        """One thing; returns when it is over, though perhaps not healed."""
        instances = await all_ready(self._status)
        chosen = self._dice.choice(instances)
        name, strike = self._dice.choice(
            (
                ("kill", self._kill),
                ("stop", self._stop),
                ("drain", self._drain),
                ("drain now", self._drain_now),
                ("role", self._change_role),
            )
        )
        await strike(chosen)
        self.struck[name] += 1

    async def _kill(self, _: cluster_pb2.InstanceStatus) -> None:
        os.kill(self._victim(), signal.SIGKILL)

    async def _stop(self, _: cluster_pb2.InstanceStatus) -> None:
        victim = psutil.Process(self._victim())
        victim.suspend()
        await asyncio.sleep(STOPPED_S)
        # Whoever watches over it may have ended it by now.
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.resume()

    async def _drain(self, chosen: cluster_pb2.InstanceStatus) -> None:
        await self._drained(chosen.instance_id, now=False)

    async def _drain_now(self, chosen: cluster_pb2.InstanceStatus) -> None:
        await self._drained(chosen.instance_id, now=True)

    async def _drained(self, instance_id: str, *, now: bool) -> None:
        address = self._running.grpc
        await asyncio.to_thread(operate.drain, address, instance_id, now=now)
        await asyncio.sleep(LASTS_S)
        await asyncio.to_thread(operate.drain, address, instance_id, undo=True)

    async def _change_role(self, chosen: cluster_pb2.InstanceStatus) -> None:
        role = Role.from_number(chosen.role)
        other = Role.PREFILL if role is Role.DECODE else Role.DECODE
        address = self._running.grpc
        await asyncio.to_thread(operate.change_role, address, chosen.instance_id, other)
        await asyncio.sleep(LASTS_S)
        await asyncio.to_thread(operate.change_role, address, chosen.instance_id, role)

    def _victim(self) -> int:
        """The process of an instance that is not spared."""
        return self._dice.choice(sorted(workers(self._running.pid).keys() - self._spared))
