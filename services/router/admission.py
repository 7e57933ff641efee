"""What is too much is refused at once: too many requests, too long a queue, too late an answer.

``Admission`` counts, before any work is done; entered by both public faces. ``check_in_time``
judges a typed request by what is predicted for it; asked by ``attempts``.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from services.router.prediction import Prediction
from services.runtime.errors import DeadlineExceeded, ResourceExhausted, Unavailable

RETRY_AFTER_S = 1.0


def check_in_time(predicted: Prediction, max_wait_s: float, left_s: float | None) -> None:
    """Refuse what would wait too long, or could not have its first token in time.

    Args:
        left_s: until the client's deadline; None: it has none.

    Raises:
        ResourceExhausted: with a hint when the queue will be short enough.
        DeadlineExceeded: the deadline would be missed without any queue, too.
    """
    if predicted.wait_s > max_wait_s:
        raise _too_late(
            f"the prompt would wait {predicted.wait_s:.1f} s, the limit is {max_wait_s:g} s",
            predicted.wait_s - max_wait_s,
        )
    if left_s is not None and predicted.ttft_s > left_s:
        said = (
            f"the first token would take {predicted.ttft_s:.1f} s, the deadline is in "
            f"{max(0.0, left_s):.1f} s"
        )
        if predicted.ttft_s - predicted.wait_s > left_s:
            raise DeadlineExceeded(said)
        raise _too_late(said, predicted.wait_s)


def _too_late(what: str, retry_after_s: float) -> ResourceExhausted:
    after_s = max(RETRY_AFTER_S, retry_after_s)
    return ResourceExhausted(f"{what}: try again in {after_s:.0f} s", after_s)


class Admission:
    """A counter with a limit, that can be closed for good."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_open = True

    @contextlib.contextmanager
    def enter(self, count: int = 1) -> Iterator[None]:
        """Hold room for ``count`` requests.

        Raises:
            ResourceExhausted: there is none now.
            Unavailable: the router is stopping.
        """
        if not self.is_open:
            raise Unavailable("the router is stopping")
        if self._num_requests + count > self._max_requests:
            raise ResourceExhausted(
                f"{self._num_requests} requests are running, the limit is {self._max_requests}: "
                f"try again in {RETRY_AFTER_S:g} s",
                RETRY_AFTER_S,
            )
        self._num_requests += count
        self._idle.clear()
        try:
            yield
        finally:
            self._num_requests -= count
            if not self._num_requests:
                self._idle.set()

    def close(self) -> None:
        """Let nobody in any more."""
        self.is_open = False

    async def idle(self) -> None:
        """Until nobody is inside."""
        await self._idle.wait()
