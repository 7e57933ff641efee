"""Standard gRPC health, following whether the router can admit a request.

Knows nothing of instances. Told by ``app`` at every change, mounted on both gRPC ports.
"""

import asyncio

from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """The health of the whole server and of its services, always the same for all."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self.servicer = grpc_health.aio.HealthServicer()
        self._services = ("", *services)
        self._is_serving: bool | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, is_serving: bool) -> None:
        """Take over the state; watchers hear of a change."""
        if is_serving == self._is_serving:
            return
        self._is_serving = is_serving
        task = asyncio.create_task(self._set())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _set(self) -> None:
        for service in self._services:
            # Read late: of two changes in a row, the later one stands.
            await self.servicer.set(service, SERVING if self._is_serving else NOT_SERVING)
