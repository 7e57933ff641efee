"""Words of launching: what it is to place a worker, whichever machinery does it. No behaviour.

A launcher puts workers somewhere and tells when one has died. It knows nothing of roles,
restarts or requests; ``services.launch.supervise`` decides, ``processes`` and ``actors`` do.
"""

from collections.abc import Mapping
from typing import Protocol

from services.runtime.settings import WorkerConfig


class LaunchError(Exception):
    """A service could not be started or kept. The message is one line, for the person who did."""


class Instance(Protocol):
    """One service that was started and is, or was, up."""

    @property
    def name(self) -> str:
        """For people: ``decode-0``."""
        ...

    @property
    def addresses(self) -> Mapping[str, str]:
        """Where it listens, ``host:port`` by name of the server."""
        ...

    async def died(self) -> str:
        """Wait until it is gone, however that came; the reason in one line."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Ask it to finish; after ``grace_s`` seconds end it. Returns when it is gone."""
        ...

    def kill(self) -> None:
        """End it at once. Does not wait."""
        ...


class Launcher(Protocol):
    """Places workers, nothing else."""

    async def place(self, name: str, config: WorkerConfig) -> Instance:
        """Start a worker and wait until it is ready.

        Raises:
            LaunchError: it could not start. Nothing of it is left.
        """
        ...

    def forget(self, name: str) -> None:
        """Nobody of this name comes again soon: give back what was kept for it."""
        ...

    async def close(self) -> None:
        """Give back what placing needed. Instances are stopped before."""
        ...
