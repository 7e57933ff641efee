"""One router's stream: batching, cancellation, breaking."""

import asyncio
from collections.abc import AsyncIterator

from services.runtime.session import Session


class Router:
    """The other end: a stream of commands that can be fed and closed."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[str | None] = asyncio.Queue()

    def say(self, command: str | None) -> None:
        self._queue.put_nowait(command)

    async def __aiter__(self) -> AsyncIterator[str]:
        while (command := await self._queue.get()) is not None:
            yield command


def said(batches: list[list[str]]) -> list[str]:
    return [event for batch in batches for event in batch]


async def serve(session: Session[str], router: Router, batches: list[list[str]]) -> None:
    async def work(name: str) -> None:
        try:
            for i in range(3):
                session.emit(f"{name}{i}")
                await asyncio.sleep(0)
            if name == "forever":
                await asyncio.Event().wait()
        finally:
            session.emit(f"{name}-end")

    def handle(command: str) -> None:
        if command.startswith("abort "):
            session.abort(command.removeprefix("abort "))
        else:
            session.start(command, work(command))

    async for batch in session.run(aiter(router), handle):
        batches.append(batch)


async def test_events_of_one_turn_share_a_message() -> None:
    router, batches = Router(), list[list[str]]()
    for command in ("a", "b", "c", None):
        router.say(command)
    await asyncio.wait_for(serve(Session(), router, batches), 5)
    assert sorted(said(batches)) == sorted(f"{n}{i}" for n in "abc" for i in (0, 1, 2, "-end"))
    assert len(batches) < 12


async def test_ending_the_commands_lets_requests_finish() -> None:
    router, batches = Router(), list[list[str]]()
    router.say("a")
    router.say(None)
    await asyncio.wait_for(serve(Session(), router, batches), 5)
    assert said(batches)[-1] == "a-end"


async def test_abort_cancels_one_request_only() -> None:
    router, batches = Router(), list[list[str]]()
    for command in ("forever", "a", "abort forever", "abort unknown", None):
        router.say(command)
    await asyncio.wait_for(serve(Session(), router, batches), 5)
    heard = said(batches)
    assert "a-end" in heard and "a2" in heard


async def test_a_broken_stream_cancels_everything() -> None:
    session: Session[str] = Session()
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def broken() -> AsyncIterator[str]:
        yield "start"
        await asyncio.Event().wait()

    def handle(command: str) -> None:
        session.start("a", work())
        session.emit("started")

    stream = session.run(broken(), handle)
    assert await anext(stream) == ["started"]
    await stream.aclose()
    await asyncio.wait_for(cancelled.wait(), 5)
    session.emit("late")  # dropped without harm


async def test_a_running_id_cannot_be_started_twice() -> None:
    session: Session[str] = Session()

    async def work() -> None:
        await asyncio.Event().wait()

    assert session.start("a", work())
    assert not session.start("a", work())
    session.abort("a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert session.start("a", work())
    session.abort("a")
