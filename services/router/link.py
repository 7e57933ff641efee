"""The router's one stream to one instance; all its requests share it.

    1  open     connect, open Prefill.Run or Decode.Run by the instance's role
    2  start    a command goes out; from now on the request's events go to its sink
    3  events   one message may carry events of many requests; each goes to its own sink
    4  stop     StopWork goes out; what still comes for that request is dropped
    5  broken   every sink hears it at once, and so does the owner

Knows nothing of what requests mean. Opened by ``fleet``, used by ``dispatch``.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from protos import worker_pb2 as wire
from services.router.membership import Instance, Pending
from services.router.streams import Dial, WorkStream
from services.runtime.errors import ServiceError, Unavailable
from services.runtime.settings import Role

log = logging.getLogger(__name__)

Event = wire.PrefillEvent | wire.DecodeEvent
Sink = Callable[[Event | ServiceError], None]
"""Hears a request's events; an error is the last one."""


class Link:
    """One stream, many requests."""

    def __init__(
        self, instance: Instance, dial: Dial, on_broken: Callable[["Link", ServiceError], None]
    ) -> None:
        self.instance = instance
        self._dial = dial
        self._on_broken = on_broken
        self._is_prefill = instance.role is Role.PREFILL
        self._sinks: dict[str, Sink] = {}
        self._num_prompt_tokens: dict[str, int] = {}
        self._prompt_since_s: dict[str, float] = {}
        self._computed_s = 0.0
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._stream: WorkStream | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._error: ServiceError | None = None
        self.has_died = False
        """It broke, and nobody had asked the instance to go."""

    @property
    def is_broken(self) -> bool:
        """Nothing can be started here any more."""
        return self._error is not None

    @property
    def pending(self) -> Pending:
        """What was started here and has not ended."""
        prompts = self._num_prompt_tokens.values()
        return Pending(len(self._sinks), sum(prompts), len(prompts))

    async def open(self) -> None:
        """Connect and open the stream.

        Raises:
            Unavailable: the instance does not answer.
        """
        self._stream = stream = await self._dial(self.instance)
        self._tasks = [
            asyncio.create_task(self._read(stream), name=f"read-{self.instance.instance_id}"),
            asyncio.create_task(self._write(stream), name=f"write-{self.instance.instance_id}"),
        ]

    def start(
        self, start: wire.StartPrefill | wire.StartDecode, sink: Sink, num_prompt_tokens: int = 0
    ) -> None:
        """Send a request's order. On a broken stream the sink hears that instead.

        Args:
            num_prompt_tokens: what it will compute of the prompt, as far as we know.
        """
        if self._error is not None:
            sink(self._error)
            return
        request_id = start.request.request_id
        self._sinks[request_id] = sink
        if num_prompt_tokens:
            self._num_prompt_tokens[request_id] = num_prompt_tokens
            self._prompt_since_s[request_id] = asyncio.get_running_loop().time()
        self._send(start=start)

    def stop(self, request_id: str) -> None:
        """Make the instance drop a request; nothing more is heard of it."""
        if self._forget(request_id) is not None:
            self._send(abort=wire.StopWork(request_id=request_id))

    def computed(self, request_id: str) -> float | None:
        """Its prompt has been computed. Returns how long the instance was at it, as far as can be
        seen from here: from the end of the prompt before, or since it was asked; None: it was not
        asked to."""
        now_s = asyncio.get_running_loop().time()
        self._num_prompt_tokens.pop(request_id, None)
        since_s = self._prompt_since_s.pop(request_id, None)
        before_s, self._computed_s = self._computed_s, now_s
        return None if since_s is None else now_s - max(since_s, before_s)

    def done(self, request_id: str) -> None:
        """The request's terminal event was heard."""
        self._forget(request_id)

    async def close(self, error: ServiceError, *, died: bool = False) -> None:
        """End the stream; the requests still on it end with ``error``."""
        self.has_died = self.has_died or died
        self._fail(error)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()

    def _forget(self, request_id: str) -> Sink | None:
        self._num_prompt_tokens.pop(request_id, None)
        self._prompt_since_s.pop(request_id, None)
        return self._sinks.pop(request_id, None)

    def _send(self, **command: Any) -> None:
        kind = wire.PrefillCommand if self._is_prefill else wire.DecodeCommand
        self._outgoing.put_nowait(kind(**command))

    async def _write(self, stream: WorkStream) -> None:
        while True:
            command = await self._outgoing.get()
            try:
                await stream.write(command)
            except Unavailable:
                return  # the reader hears why

    async def _read(self, stream: WorkStream) -> None:
        try:
            async for message in stream.events():
                for event in message.events:
                    if sink := self._sinks.get(event.request_id):
                        sink(event)
            reason = "it ended the stream"
        except ServiceError as error:
            reason = str(error)
        role, address = self.instance.role.value, self.instance.address
        log.warning("lost instance %s: %s", self.instance.instance_id, reason)
        gone = Unavailable(f"the {role} instance at {address} went away")
        self.has_died = True
        self._fail(gone)
        self._on_broken(self, gone)

    def _fail(self, error: ServiceError) -> None:
        if self._error is None:
            self._error = error
        sinks, self._sinks = self._sinks, {}
        self._num_prompt_tokens.clear()
        self._prompt_since_s.clear()
        for sink in sinks.values():
            sink(error)
