"""The port where an instance's metrics are read, and where an orchestrator asks how it is.

    /metrics   the registry, as Prometheus reads it
    /health    200 while the event loop turns: for a liveness probe
    /ready     200 while requests may come, else 503: for a readiness probe

Answers on threads of its own, so the two questions are put to the event loop, and no answer within
a second is a no. Knows no metric, nor what makes an instance ready. Used by ``services.worker``.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server

from services.runtime.address import check_bind, join_address, numeric_host
from services.runtime.errors import Unavailable
from services.runtime.lifecycle import Component

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

ASK_TIMEOUT_S = 1.0


class MetricsServer(Component):
    """Serves a registry at ``http://host:port/metrics``; ``port`` is real once it has started.

    Args:
        is_ready: whether requests may come; asked on the event loop.

    Raises (start):
        InvalidArgument: a public host without ``insecure``.
        Unavailable: the port cannot be bound.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        *,
        is_ready: Callable[[], bool] = lambda: True,
        insecure: bool = False,
    ) -> None:
        self._registry = registry
        self._host = numeric_host(host)
        self.port = port
        self._is_ready = is_ready
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
        metrics = server.get_app()
        assert metrics is not None
        server.set_app(self._with_probes(metrics, asyncio.get_running_loop()))

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

    def _with_probes(
        self, metrics: "WSGIApplication", loop: asyncio.AbstractEventLoop
    ) -> "WSGIApplication":
        questions: dict[str, Callable[[], bool]] = {
            "/health": lambda: True,
            "/ready": self._is_ready,
        }

        def answer(environ: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
            question = questions.get(environ["PATH_INFO"])
            if question is None:
                return metrics(environ, start)
            yes = _ask(loop, question)
            start("200 OK" if yes else "503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"yes\n" if yes else b"no\n"]

        return answer


def _ask(loop: asyncio.AbstractEventLoop, question: Callable[[], bool]) -> bool:
    """``question`` as the event loop answers it; False when it does not in time."""
    answered: concurrent.futures.Future[bool] = concurrent.futures.Future()
    try:
        loop.call_soon_threadsafe(lambda: answered.set_result(question()))
        return answered.result(ASK_TIMEOUT_S)
    except (RuntimeError, TimeoutError):  # the loop has ended, or stands still
        return False
