"""How many requests the router works on at once; what is too much is refused at the door.

Knows nothing of requests but their number. Entered by both public faces before any work is done.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from services.runtime.errors import ResourceExhausted, Unavailable

RETRY_AFTER_S = 1.0


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
