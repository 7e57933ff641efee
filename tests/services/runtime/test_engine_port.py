"""Events find their request; layers are told where they happen; waiters hear of movement."""

import asyncio
import threading

from engine.core import StepRecord
from engine.plan import EngineEvent, Sampled, ScheduledSequence, StepPlan
from engine.request import SamplingParams
from services.runtime.engine_port import EnginePort


def plan(request_id: str, end: int) -> StepPlan:
    row = ScheduledSequence(request_id, tuple(range(end)), 0, (0,), True, SamplingParams())
    return StepPlan(1, (row,), 0, end)


async def test_events_reach_their_subscriber_on_the_loop() -> None:
    records: list[StepRecord] = []
    port = EnginePort(asyncio.get_running_loop(), records.append)
    heard: list[EngineEvent] = []
    where: list[int] = []

    def on_event(event: EngineEvent) -> None:
        heard.append(event)
        where.append(threading.get_ident())

    port.subscribe("a", on_event)
    events: list[EngineEvent] = [Sampled("a", 1, None), Sampled("other", 2, None)]
    moved = asyncio.create_task(port.moved())
    await asyncio.sleep(0)
    await asyncio.to_thread(port.stepped, events, StepRecord(1, 0, 0.1))
    await asyncio.wait_for(moved, 5)
    assert heard == [Sampled("a", 1, None)]
    assert where == [threading.get_ident()]
    assert records == [StepRecord(1, 0, 0.1)]


async def test_layers_are_told_on_the_calling_thread() -> None:
    port = EnginePort(asyncio.get_running_loop(), lambda _: None)
    told: list[tuple[int, int, int]] = []

    def on_layer(layer: int, num_tokens: int) -> None:
        told.append((layer, num_tokens, threading.get_ident()))

    port.subscribe("a", lambda _: None, on_layer)
    port.layer_written(plan("other", 8), 0)
    port.layer_written(plan("a", 8), 2)
    assert told == [(2, 8, threading.get_ident())]
    port.unsubscribe("a")
    port.layer_written(plan("a", 8), 3)
    assert len(told) == 1


async def test_unsubscribing_wakes_who_waits_for_blocks() -> None:
    port = EnginePort(asyncio.get_running_loop(), lambda _: None)
    moved = asyncio.create_task(port.moved())
    await asyncio.sleep(0)
    port.unsubscribe("whoever")
    await asyncio.wait_for(moved, 5)
