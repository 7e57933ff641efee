"""Workers as Ray actors.

Each actor hosts the same ``Worker`` as a child process would: an asyncio actor whose loop serves
gRPC. Ray places it where its resources are; workers that are neighbours get one placement group,
so they share a node where one has room. An actor that died, or that we do not reach any more, is
given up; another takes its place with a new instance id, and registers a new address with the
router by itself. The router stays a child process of ours.

Without an address a private Ray is started, on this machine, for as long as this process lives;
with one, workers go to that cluster, where this package has to be installed, too. Knows nothing of
roles or restarts. Used by ``supervise`` through ``place``.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.launch.place import LaunchError
from services.launch.transfer import read_config, write_config
from services.runtime.address import join_address
from services.runtime.certificates import NO_TLS, TlsFiles
from services.runtime.errors import one_line
from services.runtime.server import TOKEN_VARIABLE, open_channel
from services.runtime.settings import WorkerConfig

log = logging.getLogger(__name__)

PROJECT = Path(__file__).resolve().parent.parent.parent
NAMESPACE = "kvrelay"
EVERYWHERE = "0.0.0.0"
ROOM_S = 60.0
"""How long Ray may look for a place before a worker counts as one that cannot start."""
BEAT_S = 1.0
BEAT_TIMEOUT_S = 2.0
MISSED_BEATS = 2
DEVICES = "CUDA_VISIBLE_DEVICES"


class WorkerActor:
    """What runs inside an actor. Everything that comes in or goes out is text."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._drain_s = 0.0
        self._leaving = asyncio.Event()

    async def start(self, config_line: str) -> dict[str, str]:
        """Where it listens, its node and its devices, or ``{"failed": reason}``: an exception
        would carry a traceback."""
        from services.runtime import journal
        from services.runtime.errors import to_service_error
        from services.worker.app import Worker

        journal.configure()
        config = read_config(config_line)
        assert isinstance(config, WorkerConfig)
        node = _node_address()
        if config.host == EVERYWHERE:
            config = dataclasses.replace(config, advertise_host=node)
        try:
            config.validate()
            self._worker = Worker(config, on_leave=self._leaving.set)
            self._drain_s = config.drain_timeout_s
            await self._worker.start()
        except Exception as error:
            return {"failed": str(to_service_error(error))}
        addresses: dict[str, str] = dataclasses.asdict(self._worker.addresses)
        return addresses | {"node": _node_id(), "devices": os.environ.get(DEVICES, "")}

    async def watch(self) -> str:
        """Wait until the worker can no longer do its work, or is told to go; the reason."""
        from services.runtime.errors import to_service_error

        working = asyncio.create_task(self._worker.watch())
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                return "ended"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_s):
                    await self._worker.drain()
            await self._worker.stop()
        except Exception as error:
            return str(to_service_error(error))
        finally:
            working.cancel()
            leaving.cancel()
        return "left"

    async def leave(self) -> None:
        """Drain and go; ``watch`` says when that is done."""
        self._leaving.set()


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


class ActorInstance:
    """One worker in an actor of its own.

    Args:
        answer: what its ``start`` said.
    """

    def __init__(
        self, name: str, actor: Any, answer: Mapping[str, str], tls: TlsFiles = NO_TLS
    ) -> None:
        self._tls = tls
        self._name = name
        self._actor = actor
        self._addresses = {key: answer[key] for key in ("grpc", "metrics")}
        self.node = answer["node"]
        """Ray's id of the node it is on."""
        self.devices = answer["devices"]
        """The GPUs that Ray gave it, as CUDA counts them; empty: none."""
        self._ended = asyncio.create_task(self._watch(), name=f"actor {name}")

    @property
    def name(self) -> str:
        return self._name

    @property
    def addresses(self) -> Mapping[str, str]:
        return self._addresses

    async def died(self) -> str:
        return await asyncio.shield(self._ended)

    async def stop(self, grace_s: float) -> None:
        import ray

        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            async with asyncio.timeout(grace_s):
                await self._actor.leave.remote()
                await self.died()
        self.kill()
        await self.died()

    def kill(self) -> None:
        import ray

        ray.kill(self._actor, no_restart=True)

    async def _watch(self) -> str:
        """Ray's word or ours, whichever comes first: of a lost node Ray hears late."""
        watchers = [asyncio.create_task(each) for each in (self._told(), self._unreachable())]
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            reason = done.pop().result()
        finally:
            for each in watchers:
                each.cancel()
        self.kill()  # its engine is of no use any more, and it holds the resources
        return reason

    async def _told(self) -> str:
        import ray

        try:
            reason: str = await self._actor.watch.remote()
        except ray.exceptions.RayActorError as error:
            why = str(error).partition("The actor is dead because")[2] or str(error)
            return one_line(why.partition(".")[0])  # the rest is general advice
        except ray.exceptions.TaskCancelledError:
            return "stopped"
        return reason

    async def _unreachable(self) -> str:
        """Return when it has not answered several times in a row."""
        missed = 0
        address = self._addresses["grpc"]
        async with open_channel(address, self._tls) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while missed < MISSED_BEATS:
                await asyncio.sleep(BEAT_S)
                try:
                    await health.Check(health_pb2.HealthCheckRequest(), timeout=BEAT_TIMEOUT_S)
                    missed = 0
                except grpc.aio.AioRpcError:
                    missed += 1
        return f"does not answer at {address}"


class RayLauncher:
    """Places workers as Ray actors. Made by ``connect``; Ray runs already.

    Args:
        joined: this is a cluster of many machines, not a private Ray.
        neighbours: groups of names that should share a node.
    """

    def __init__(
        self,
        cpus_per_worker: float,
        gpus_per_worker: float,
        *,
        joined: bool,
        neighbours: Sequence[tuple[str, ...]] = (),
    ) -> None:
        self._needs = {"CPU": float(cpus_per_worker), "GPU": float(gpus_per_worker)}
        self._joined = joined
        self._id = secrets.token_hex(4)
        self._lives = itertools.count()
        self._group_of = {name: group for group in neighbours for name in group}
        self._groups: dict[tuple[str, ...], Any] = {}
        self._forgotten: set[str] = set()

    @classmethod
    def connect(
        cls,
        neighbours: Sequence[tuple[str, ...]],
        threads: int,
        gpus_per_worker: float = 0,
        address: str = "",
    ) -> "RayLauncher":
        """Start Ray, or join the one at ``address``.

        Blocks for seconds and installs signal handlers: to be called before the event loop runs.

        Raises:
            LaunchError: Ray is not installed, or cannot start.
        """
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before the import: nothing is reported
        try:
            import ray
        except ImportError:
            raise LaunchError("Ray is not installed: pip install 'kvrelay[ray]'") from None
        # A private Ray is told of as many CPUs as the workers ask for: whether they fit the
        # machine is the person's choice, and an actor that can never be placed would hang.
        num_workers = sum(map(len, neighbours))
        own: dict[str, Any] = {"include_dashboard": False, "num_cpus": num_workers * threads}
        try:
            # The actors' own logs stay in Ray's log folder.
            ray.init(
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace=NAMESPACE,
                **({"address": address} if address else own),
            )
        except Exception as error:
            raise LaunchError(f"Ray does not start: {one_line(str(error))}") from error
        return cls(threads, gpus_per_worker, joined=bool(address), neighbours=neighbours)

    async def place(self, name: str, config: WorkerConfig) -> ActorInstance:
        import ray

        actor = await self._actor(name, config)
        try:
            answer: dict[str, str] = await actor.start.remote(write_config(self._moved(config)))
        except ray.exceptions.RayError as error:
            raise LaunchError(f"{name}: {one_line(str(error))}") from error
        except BaseException:
            ray.kill(actor)
            raise
        if "failed" in answer:
            ray.kill(actor)
            raise LaunchError(f"{name}: {answer['failed']}")
        log.info("%s is on node %s, GPUs: %s", name, answer["node"], answer["devices"] or "none")
        return ActorInstance(name, actor, answer, config.internal_tls)

    def forget(self, name: str) -> None:
        """A group ends with its last member: to end it sooner would end the others."""
        import ray

        members = self._group_of.get(name, (name,))
        self._forgotten.add(name)
        if self._forgotten.issuperset(members) and members in self._groups:
            ray.util.remove_placement_group(self._groups.pop(members))

    async def close(self) -> None:
        """Leave Ray; a private one ends, and in another nothing of ours is left."""
        import ray

        for group in self._groups.values():
            ray.util.remove_placement_group(group)
        await asyncio.to_thread(ray.shutdown)

    async def _actor(self, name: str, config: WorkerConfig) -> Any:
        """An actor with a name of its own, in the place that was kept for it.

        Raises:
            LaunchError: the cluster has no room.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._forgotten.discard(name)
        members = self._group_of.get(name, (name,))
        strategy = PlacementGroupSchedulingStrategy(
            await self._group(members), placement_group_bundle_index=members.index(name)
        )
        variables = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": str(config.engine.threads),
            TOKEN_VARIABLE: os.environ[TOKEN_VARIABLE],
        }
        if not self._joined:
            variables["PYTHONPATH"] = str(PROJECT)
        return (
            ray.remote(WorkerActor)
            .options(
                # Ray frees a name late: each life has its own.
                name=f"{self._id}-{name}-{next(self._lives)}",
                max_restarts=0,
                num_cpus=self._needs["CPU"],
                num_gpus=self._needs["GPU"],
                scheduling_strategy=strategy,
                runtime_env={"env_vars": variables},
            )
            .remote()
        )

    async def _group(self, members: tuple[str, ...]) -> Any:
        """What is reserved for neighbours: one node where it has room, else several."""
        import ray

        group = self._groups.get(members)
        if group is None:
            bundle = {resource: count for resource, count in self._needs.items() if count}
            group = ray.util.placement_group([bundle for _ in members], strategy="PACK")
            self._groups[members] = group
        for _ in range(int(ROOM_S)):  # by seconds, so that a stop need not wait for all of it
            if await asyncio.to_thread(group.wait, 1):
                return group
        needs = " and ".join(f"{count:g} {name}" for name, count in self._needs.items() if count)
        raise LaunchError(
            f"Ray has no room for {' and '.join(members)} after {ROOM_S:g} s: each needs {needs}"
        )

    def _moved(self, config: WorkerConfig) -> WorkerConfig:
        """``config`` for another machine than this one."""
        if not self._joined:
            return config
        port = int(config.router.rpartition(":")[2])
        router = join_address(_node_address(), port)
        return dataclasses.replace(config, router=router, host=EVERYWHERE)
