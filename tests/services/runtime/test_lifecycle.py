"""Order of starts and stops, failures, draining, signals."""

import asyncio
import os
import signal

import pytest

from services.runtime.lifecycle import Component, Stack, StopSignals, run_until_stopped


class Part(Component):
    """Writes down what happens to it; fails where told."""

    def __init__(self, name: str, diary: list[str], fails: str = "") -> None:
        self._name = name
        self._diary = diary
        self._fails = fails
        self.broken = asyncio.Event()
        self.drained = asyncio.Event()
        self.drained.set()

    def _note(self, verb: str) -> None:
        self._diary.append(f"{verb} {self._name}")
        if self._fails == verb:
            raise RuntimeError(f"{verb} {self._name}")

    async def start(self) -> None:
        self._note("start")

    async def watch(self) -> None:
        await self.broken.wait()
        raise RuntimeError(f"broken {self._name}")

    async def drain(self) -> None:
        self._note("drain")
        await self.drained.wait()

    async def stop(self) -> None:
        self._note("stop")


async def test_parts_start_in_order_and_stop_in_reverse() -> None:
    diary: list[str] = []
    stop = asyncio.Event()

    async def ready() -> None:
        diary.append("ready")
        stop.set()

    await run_until_stopped(Stack(Part("a", diary), Part("b", diary)), stop, on_ready=ready)
    assert diary == ["start a", "start b", "ready", "drain a", "drain b", "stop b", "stop a"]


async def test_a_failed_start_stops_what_was_started() -> None:
    diary: list[str] = []
    stack = Stack(Part("a", diary), Part("b", diary, fails="start"), Part("c", diary))
    with pytest.raises(RuntimeError, match="start b"):
        await run_until_stopped(stack, asyncio.Event())
    assert diary == ["start a", "start b", "stop b", "stop a"]


async def test_the_first_failure_is_raised_and_all_are_stopped() -> None:
    diary: list[str] = []
    stack = Stack(Part("a", diary, fails="stop"), Part("b", diary, fails="stop"))
    await stack.start()
    with pytest.raises(RuntimeError, match="stop b"):
        await stack.stop()
    with pytest.raises(RuntimeError, match="stop b"):
        await stack.stop()  # the same end, not another stop
    assert diary[2:] == ["stop b", "stop a"]


async def test_a_part_that_breaks_ends_the_run_with_its_failure() -> None:
    diary: list[str] = []
    part = Part("a", diary)
    part.broken.set()
    with pytest.raises(RuntimeError, match="broken a"):
        await run_until_stopped(Stack(part, Part("b", diary, fails="stop")), asyncio.Event())
    assert diary[-2:] == ["stop b", "stop a"]


async def test_a_stop_while_starting_stops() -> None:
    class Slow(Part):
        async def start(self) -> None:
            await super().start()
            await asyncio.sleep(60)

    diary: list[str] = []
    stop = asyncio.Event()
    running = asyncio.create_task(run_until_stopped(Stack(Slow("a", diary)), stop))
    await asyncio.sleep(0.01)
    stop.set()
    await asyncio.wait_for(running, 2)
    assert diary == ["start a", "stop a"]


@pytest.mark.parametrize("cut", ["timeout", "hurry"])
async def test_draining_is_bounded(cut: str) -> None:
    diary: list[str] = []
    part = Part("a", diary)
    part.drained.clear()
    stop, hurry = asyncio.Event(), asyncio.Event()
    stop.set()
    if cut == "hurry":
        hurry.set()
    timeout_s = 0.05 if cut == "timeout" else 60.0
    running = run_until_stopped(Stack(part), stop, hurry=hurry, drain_timeout_s=timeout_s)
    # A stop that is already wanted when the start ends is a normal stop.
    await asyncio.wait_for(running, 2)
    assert diary[-1] == "stop a"


async def test_signals_only_set_events() -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(signals.stop.wait(), 2)
        assert not signals.hurry.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(signals.hurry.wait(), 2)
