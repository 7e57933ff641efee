"""Work that must end, and waits that must not outlive what they belong to."""

import asyncio

import pytest

from services.runtime.background import Background, unless


async def test_settle_waits_for_everything_also_what_comes_late() -> None:
    background, done = Background(), []

    async def work(name: str, follow_up: bool) -> None:
        await asyncio.sleep(0.01)
        done.append(name)
        if follow_up:
            background.spawn(work("late", False))

    background.spawn(work("early", True))
    await background.settle()
    assert done == ["early", "late"]


async def test_a_failure_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    background, done = Background(), asyncio.Event()

    async def fail() -> None:
        raise ValueError("nobody to tell")

    async def work() -> None:
        done.set()

    background.spawn(fail())
    background.spawn(work())
    await background.settle()
    assert done.is_set()
    assert "ValueError" in caplog.text


async def test_unless_gives_what_was_wanted() -> None:
    ending = asyncio.get_running_loop().create_future()
    assert await unless(asyncio.sleep(0, "here"), ending) == "here"


async def test_unless_ends_with_the_other_one() -> None:
    ending = asyncio.get_running_loop().create_future()
    wanted = asyncio.create_task(asyncio.Event().wait())
    asyncio.get_running_loop().call_later(0.01, ending.set_exception, RuntimeError("over"))
    with pytest.raises(RuntimeError, match="over"):
        await asyncio.wait_for(unless(wanted, ending), 5)
    await asyncio.sleep(0)
    assert wanted.cancelled()
