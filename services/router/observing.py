"""What operators read over HTTP: metrics, and where Prometheus finds those of the instances.

Knows nothing of OpenAI's API, beside which it is mounted. Made by ``app``.
"""

from collections.abc import Callable

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.router.membership import Snapshot


class Observing:
    """Routes and their handlers.

    Args:
        refresh: brings gauges up to date before they are read.
        cluster: the instances now.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        refresh: Callable[[], None],
        cluster: Callable[[], Snapshot],
    ) -> None:
        self._registry = registry
        self._refresh = refresh
        self._cluster = cluster

    def mount(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/metrics", self.metrics, methods=["GET"])
        app.add_api_route("/metrics/targets", self.targets, methods=["GET"])

    async def metrics(self, request: Request) -> Response:
        """Everything this router measures, as Prometheus reads it."""
        self._refresh()
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (ValueError, TypeError):  # a version that is no version
            encode, content_type = choose_encoder("")
        return Response(encode(self._registry), headers={"content-type": content_type})

    async def targets(self) -> Response:
        """Metrics ports of the instances, for Prometheus' HTTP service discovery."""
        addresses = [view.instance.metrics_address for view in self._cluster().instances]
        return JSONResponse([{"targets": sorted(filter(None, addresses)), "labels": {}}])
