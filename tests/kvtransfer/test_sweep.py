"""The sweep ticks in time, forgives a deaf moment once, and survives a failing tick."""

import asyncio
from collections.abc import Callable

import pytest

from kvtransfer import sweep as module
from kvtransfer.sweep import sweep


class Clock:
    """Time that passes by ``step`` at every look."""

    def __init__(self, step: float) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


async def ticks_of(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tick: Callable[[float], None] | None = None
) -> list[float]:
    monkeypatch.setattr(module, "SWEEP_S", 0.001)
    seen: list[float] = []

    def note(now: float) -> None:
        seen.append(now)
        if tick is not None:
            tick(now)

    task = asyncio.create_task(sweep(clock, note))
    async with asyncio.timeout(5):
        while len(seen) < 4:
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return seen[:4]


async def test_it_ticks_at_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await ticks_of(Clock(0.5), monkeypatch) == [1.0, 1.5, 2.0, 2.5]


async def test_a_loop_that_is_always_late_leaves_out_every_other_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await ticks_of(Clock(3.0), monkeypatch) == [9.0, 15.0, 21.0, 27.0]


async def test_a_failing_tick_is_logged_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(now: float) -> None:
        raise RuntimeError(f"at {now}")

    assert len(await ticks_of(Clock(0.5), monkeypatch, fail)) == 4
    assert "at 1.0" in caplog.text
