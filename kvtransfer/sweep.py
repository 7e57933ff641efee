"""The timer behind leases: calls a machine's ``tick`` twice a second. Decides nothing."""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

SWEEP_S = 0.5
_DEAF_S = 1.0


async def sweep(clock: Callable[[], float], tick: Callable[[float], None]) -> None:
    """Tick until cancelled.

    A loop that was held up could not hear its peers either: after a late wake-up one tick is
    left out, so that what has come meanwhile is read before leases are judged.
    """
    previous = clock()
    was_deaf = False
    while True:
        await asyncio.sleep(SWEEP_S)
        now = clock()
        was_deaf = not was_deaf and now - previous > SWEEP_S + _DEAF_S
        previous = now
        if was_deaf:
            logger.info("the event loop was held up; leases are judged half a second later")
            continue
        try:
            tick(now)
        except Exception:
            logger.exception("a KV transfer sweep failed; the next one goes on")
