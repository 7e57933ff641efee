"""Layer-ready: which layers of a prompt's KV may be read, up to which token.

The engine's thread marks, an asyncio task waits. Knows nothing of handoffs or of tensors.
"""

import asyncio
import threading


class Readiness:
    """For each layer, how many tokens of a prompt are written and may be read.

    Made on the event loop that waits; ``mark`` may be called from any thread.
    """

    def __init__(self, num_layers: int) -> None:
        self._lock = threading.Lock()
        self._num_tokens = [0] * num_layers
        self._loop = asyncio.get_running_loop()
        self._moved = asyncio.Event()
        self._is_waking = False
        self._is_closed = False

    def mark(self, layer: int, num_tokens: int) -> None:
        """The KV of tokens 0 .. num_tokens - 1 of ``layer`` is written. Never goes back.

        Many marks between two turns of the loop wake it once.
        """
        with self._lock:
            if self._is_closed or num_tokens <= self._num_tokens[layer]:
                return
            self._num_tokens[layer] = num_tokens
            if self._is_waking:
                return
            self._is_waking = True
        self._loop.call_soon_threadsafe(self._wake)

    def snapshot(self) -> list[int]:
        """Readable tokens of each layer."""
        with self._lock:
            return list(self._num_tokens)

    async def changed(self) -> None:
        """Returns once something was marked, or closed, since the last return."""
        await self._moved.wait()
        self._moved.clear()

    def close(self) -> None:
        """Wakes the waiter for good; later marks do nothing. Called on the loop."""
        with self._lock:
            self._is_closed = True
        self._moved.set()

    def _wake(self) -> None:
        with self._lock:
            self._is_waking = False
        self._moved.set()
