"""Marks from another thread reach the loop; many of them wake it once."""

import asyncio
import threading

from kvtransfer.readiness import Readiness


async def test_a_mark_from_a_thread_wakes_the_waiter() -> None:
    readiness = Readiness(3)
    threading.Timer(0.01, readiness.mark, (1, 5)).start()
    async with asyncio.timeout(2):
        await readiness.changed()
    assert readiness.snapshot() == [0, 5, 0]


async def test_marks_never_go_back() -> None:
    readiness = Readiness(1)
    readiness.mark(0, 8)
    await readiness.changed()
    readiness.mark(0, 4)
    readiness.mark(0, 8)
    assert readiness.snapshot() == [8]
    try:
        async with asyncio.timeout(0.02):
            await readiness.changed()
    except TimeoutError:
        return
    raise AssertionError("woken by a mark that says nothing new")


async def test_many_marks_wake_once_and_none_is_lost() -> None:
    readiness = Readiness(4)
    wakes = 0

    def compute() -> None:
        for num_tokens in range(1, 501):
            for layer in range(4):
                readiness.mark(layer, num_tokens)

    computing = asyncio.create_task(asyncio.to_thread(compute))
    async with asyncio.timeout(10):
        while readiness.snapshot() != [500] * 4:
            await readiness.changed()
            wakes += 1
    await computing
    assert wakes < 2000


async def test_closing_wakes_for_good_and_ends_marking() -> None:
    readiness = Readiness(1)
    waiter = asyncio.create_task(readiness.changed())
    await asyncio.sleep(0)
    readiness.close()
    await asyncio.wait_for(waiter, 1)
    readiness.mark(0, 3)
    assert readiness.snapshot() == [0]
