"""The port where an instance's metrics are read. Knows no metric. Used by ``services.worker``."""

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry, start_http_server

from services.runtime.address import check_bind, join_address, numeric_host
from services.runtime.errors import Unavailable
from services.runtime.lifecycle import Component


class MetricsServer(Component):
    """Serves a registry at ``http://host:port/metrics``; ``port`` is real once it has started.

    Raises (start):
        InvalidArgument: a public host without ``insecure``.
        Unavailable: the port cannot be bound.
    """

    def __init__(
        self, registry: CollectorRegistry, host: str, port: int, *, insecure: bool = False
    ) -> None:
        self._registry = registry
        self._host = numeric_host(host)
        self.port = port
        self._insecure = insecure
        self._stop: Callable[[], None] | None = None

    @property
    def address(self) -> str:
        return join_address(self._host, self.port)

    async def start(self) -> None:
        check_bind(self._host, self._insecure)
        try:
            server, thread = start_http_server(self.port, self._host, self._registry)
        except OSError as error:
            raise Unavailable(f"cannot bind {self.address}: {error.strerror}") from error
        self.port = int(server.server_address[1])

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._stop = stop

    async def stop(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            # shutdown() waits for the serving thread's next turn, half a second at most.
            await asyncio.to_thread(stop)
