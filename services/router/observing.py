"""What operators read over HTTP: metrics, where Prometheus finds those of the instances, and
where the time of one request went.

Knows nothing of OpenAI's API, beside which it is mounted. Made by ``app``.
"""

from collections.abc import Callable

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.router.membership import Snapshot
from services.router.openai_answers import error_object
from services.router.trace import chrome
from services.router.traces import Traces
from services.runtime.errors import NotFound


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
        traces: Traces,
    ) -> None:
        self._registry = registry
        self._refresh = refresh
        self._cluster = cluster
        self._traces = traces

    def mount(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/metrics", self.metrics, methods=["GET"])
        app.add_api_route("/metrics/targets", self.targets, methods=["GET"])
        app.add_api_route("/debug/requests/{request_id}", self.request, methods=["GET"])

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

    async def request(self, request_id: str) -> Response:
        """A request's trace, for Perfetto or chrome://tracing; ids of OpenAI's answers will do."""
        trace = self._traces.find(request_id.rpartition("-")[2])
        if trace is not None:
            return JSONResponse(chrome(trace))
        error = NotFound("no such request, or it runs, or it ended too long ago to be remembered")
        return JSONResponse(error_object(error), status_code=error.codes.http)
