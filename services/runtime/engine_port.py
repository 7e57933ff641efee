"""The asyncio face of an engine: events leave the step thread and reach whoever waits for them.

The engine tells everything on its step thread, one list a step; one wake-up of the event loop
hands the list on, each event to the subscriber of its request. Layers are the exception: they
are told where they are noticed, off the loop, because the sender must hear of a layer while the
next one computes.

Knows nothing of handoffs, of text or of the wire. Used by the prefill and the decode service.
"""

import asyncio
from collections.abc import Callable

from engine.core import StepRecord
from engine.plan import EngineEvent, StepPlan

EventHandler = Callable[[EngineEvent], None]
LayerHandler = Callable[[int, int], None]
"""Called off the loop with (layer, num_tokens): KV of tokens below is in the cache."""


class EnginePort:
    """Listener of one engine, bound to one event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_step: Callable[[StepRecord], None]
    ) -> None:
        self._loop = loop
        self._on_step = on_step
        self._handlers: dict[str, EventHandler] = {}
        self._layer_handlers: dict[str, LayerHandler] = {}
        self._moved = asyncio.Event()

    def subscribe(
        self, request_id: str, on_event: EventHandler, on_layer: LayerHandler | None = None
    ) -> None:
        """Events of this request go to ``on_event`` (on the loop), layers to ``on_layer``."""
        self._handlers[request_id] = on_event
        if on_layer is not None:
            self._layer_handlers[request_id] = on_layer

    def unsubscribe(self, request_id: str) -> None:
        self._handlers.pop(request_id, None)
        self._layer_handlers.pop(request_id, None)
        self.notify_moved()

    @property
    def num_subscribers(self) -> int:
        return len(self._handlers)

    def notify_moved(self) -> None:
        """Blocks may have become free: whoever waits for some should try again."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def moved(self) -> None:
        """Until the next step or release."""
        await self._moved.wait()

    # ---- EngineListener, off the loop -------------------------------------------------------

    def wants_layers(self, plan: StepPlan) -> bool:
        return any(s.request_id in self._layer_handlers for s in plan.sequences)

    def layer_written(self, plan: StepPlan, layer: int) -> None:
        for sequence in plan.sequences:
            if handler := self._layer_handlers.get(sequence.request_id):
                handler(layer, sequence.end)

    def stepped(self, events: list[EngineEvent], record: StepRecord | None) -> None:
        # The loop is closed only after the engine stopped; a late event has nobody left to hear it.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, events, record)

    # ---- on the loop -----------------------------------------------------------------------

    def _deliver(self, events: list[EngineEvent], record: StepRecord | None) -> None:
        for event in events:
            if handler := self._handlers.get(event.request_id):
                handler(event)
        if record is not None:
            self._on_step(record)
        self.notify_moved()
