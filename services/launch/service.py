"""Run one service in this process, from its config to its end.

The only place that knows which config belongs to which service. The services are imported here
and not before: a router's process never loads torch. Called by ``child`` and by ``kvrelay
router`` and ``kvrelay worker``.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from services.launch.transfer import Config
from services.runtime.settings import RouterConfig

if TYPE_CHECKING:
    from services.worker.build import ReadModel

ReadyHandler = Callable[[Mapping[str, str]], None]
"""Told the addresses, ``host:port`` by name of the server, once the service is up."""


async def run_service(
    config: Config, on_ready: ReadyHandler, read: "ReadModel | None" = None
) -> None:
    """Serve until SIGINT or SIGTERM; returns after the drain.

    Args:
        read: of a worker: its model, where that is in memory already.

    Raises:
        Exception: it could not start, or failed later; ``to_service_error`` has the reason.
    """
    if isinstance(config, RouterConfig):
        from services.router.app import run_router

        await run_router(config, lambda addresses: on_ready(dataclasses.asdict(addresses)))
    else:
        from services.worker.app import WorkerAddresses, run_worker

        async def ready(addresses: WorkerAddresses) -> None:
            on_ready(dataclasses.asdict(addresses))

        await run_worker(config, ready, read)


def ready_line(addresses: Mapping[str, str]) -> str:
    """``ready grpc=127.0.0.1:50051 http=...``: what a started service says on its stdout."""
    return " ".join(["ready", *(f"{name}={address}" for name, address in addresses.items())])
