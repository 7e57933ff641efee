"""Workers as Ray actors.

Each actor hosts the same ``Worker`` as a child process would: an asyncio actor whose loop serves
gRPC. Ray places it where its resources are and tells when it has died; a new actor takes its
place with a new instance id, and registers a new address with the router by itself. The router
stays a child process of ours.

Without ``RAY_ADDRESS`` a private Ray is started, on this machine, for as long as this process
lives; with it, workers go to that cluster, where this package has to be installed, too. Knows
nothing of roles or restarts. Used by ``supervise`` through ``place``.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.launch.place import LaunchError
from services.launch.transfer import read_config, write_config
from services.runtime.errors import one_line
from services.runtime.server import TOKEN_VARIABLE
from services.runtime.settings import WorkerConfig

PROJECT = Path(__file__).resolve().parent.parent.parent


class WorkerActor:
    """What runs inside an actor. Everything that comes in or goes out is text."""

    def __init__(self) -> None:
        self._worker: Any = None

    async def start(self, config_line: str) -> dict[str, str]:
        """The addresses, or ``{"failed": reason}``: an exception would carry a traceback."""
        import dataclasses

        from services.runtime import journal
        from services.runtime.errors import to_service_error
        from services.worker.app import Worker

        journal.configure()
        config = read_config(config_line)
        assert isinstance(config, WorkerConfig)
        try:
            config.validate()
            self._worker = Worker(config)
            await self._worker.start()
        except Exception as error:
            return {"failed": str(to_service_error(error))}
        return dataclasses.asdict(self._worker.addresses)

    async def watch(self) -> str:
        """Wait until the worker can no longer do its work; the reason."""
        from services.runtime.errors import to_service_error

        try:
            await self._worker.watch()
        except Exception as error:
            return str(to_service_error(error))
        return "ended"

    async def stop(self) -> None:
        await self._worker.stop()


class ActorInstance:
    """One worker in an actor of its own."""

    def __init__(self, name: str, actor: Any, addresses: Mapping[str, str]) -> None:
        self._name = name
        self._actor = actor
        self._addresses = addresses
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
                await self._actor.stop.remote()
        self.kill()
        await self.died()

    def kill(self) -> None:
        import ray

        ray.kill(self._actor, no_restart=True)

    async def _watch(self) -> str:
        import ray

        try:
            reason: str = await self._actor.watch.remote()
        except ray.exceptions.RayActorError as error:
            why = str(error).partition("The actor is dead because")[2] or str(error)
            return one_line(why.partition(".")[0])  # the rest is general advice
        except ray.exceptions.TaskCancelledError:
            reason = "stopped"
        self.kill()  # its engine is of no use any more, and it holds the resources
        return reason


class RayLauncher:
    """Places workers as Ray actors. Made by ``connect``."""

    def __init__(self, cpus_per_worker: float, gpus_per_worker: float) -> None:
        self._resources = {"num_cpus": cpus_per_worker, "num_gpus": gpus_per_worker}

    @classmethod
    def connect(cls, num_workers: int, threads: int, gpus_per_worker: float = 0) -> "RayLauncher":
        """Start Ray, or join the one at ``RAY_ADDRESS``.

        Blocks for seconds and installs signal handlers: to be called before the event loop runs.

        Raises:
            LaunchError: Ray is not installed, or cannot start.
        """
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before the import: nothing is reported
        try:
            import ray
        except ImportError:
            raise LaunchError("Ray is not installed: pip install 'kvrelay[ray]'") from None
        address = os.environ.get("RAY_ADDRESS")
        # A private Ray is told of as many CPUs as the workers ask for: whether they fit the
        # machine is the person's choice, and an actor that can never be placed would hang.
        own: dict[str, Any] = {"include_dashboard": False, "num_cpus": num_workers * threads}
        try:
            # The actors' own logs stay in Ray's log folder.
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **({} if address else own))
        except Exception as error:
            raise LaunchError(f"Ray does not start: {one_line(str(error))}") from error
        return cls(threads, gpus_per_worker)

    async def place(self, name: str, config: WorkerConfig) -> ActorInstance:
        import ray

        variables = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": str(config.engine.threads),
            TOKEN_VARIABLE: os.environ[TOKEN_VARIABLE],
        }
        if not os.environ.get("RAY_ADDRESS"):
            variables["PYTHONPATH"] = str(PROJECT)
        actor: Any = (
            ray.remote(WorkerActor)
            .options(max_restarts=0, runtime_env={"env_vars": variables}, **self._resources)
            .remote()
        )
        try:
            answer: dict[str, str] = await actor.start.remote(write_config(config))
        except ray.exceptions.RayError as error:
            raise LaunchError(f"{name}: {one_line(str(error))}") from error
        except BaseException:
            ray.kill(actor)
            raise
        if "failed" in answer:
            ray.kill(actor)
            raise LaunchError(f"{name}: {answer['failed']}")
        return ActorInstance(name, actor, answer)

    async def close(self) -> None:
        """Leave Ray; a private one ends."""
        import ray

        await asyncio.to_thread(ray.shutdown)
