"""One client of a simulated cluster: what it asked, what it was told, and whether that is right."""

import asyncio
import contextlib
from dataclasses import dataclass, field

from protos import inference_pb2 as public
from services.router.serving import Serving
from services.runtime.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from tests.simulation.scenario import Ask
from tests.simulation.truth import Answer, Wrong

_FAILURES = (Unavailable, Internal, ResourceExhausted)
"""What a request may end with where instances fail."""


@dataclass(slots=True)
class Client:
    """Asks once."""

    ask: Ask
    truth: list[Answer]
    fits: bool
    """Whether any instance could ever hold it."""
    heard: list[list[int]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float | None = None
    end: public.Finished | ServiceError | None = None
    has_hung_up: bool = False
    router_died: bool = False

    async def run(self, serving: Serving) -> None:
        """As a gRPC handler does: to the end, or until it is cancelled."""
        loop = asyncio.get_running_loop()
        self.began_s = loop.time()
        self.heard = [[] for _ in self.truth]
        self.text = ["" for _ in self.truth]
        deadline_s = None if self.ask.patience_s is None else self.began_s + self.ask.patience_s
        answer = serving.answer(self.ask.request, self.began_s, deadline_s)
        try:
            async with contextlib.aclosing(answer) as events:
                async for event in events:
                    self._hear(event)
        except ServiceError as error:
            self._finish(error)
        except asyncio.CancelledError:
            self.has_hung_up = True
            raise
        finally:
            self.ended_s = loop.time()

    def _hear(self, event: object) -> None:
        if self.end is not None:
            raise Wrong(f"{self._name}: {event} came after the end")
        if isinstance(event, public.Tokens):
            heard, truth = self.heard[event.index], self.truth[event.index]
            heard.extend(event.token_ids)
            self.text[event.index] += event.text
            text = self.text[event.index]
            if heard != truth.token_ids[: len(heard)] or not truth.text.startswith(text):
                raise Wrong(f"{self._name}: heard {heard} {text!r}, the truth is {truth}")
        elif isinstance(event, public.Finished):
            self._finish(event)

    def _finish(self, end: public.Finished | ServiceError) -> None:
        if self.end is not None:
            raise Wrong(f"{self._name}: two ends: {self.end} and {end}")
        self.end = end

    def check(self, must_be_whole: bool) -> None:
        """Whether it was told the right thing.

        Raises:
            Wrong: it was not.
        """
        if self.has_hung_up or self.router_died:
            return
        if self.end is None:
            raise Wrong(f"{self._name}: was never told an end")
        if isinstance(self.end, public.Finished):
            self._check_whole(self.end)
        elif isinstance(self.end, DeadlineExceeded):
            if self.ask.patience_s is None:
                raise Wrong(f"{self._name}: has no deadline, but: {self.end}")
        elif isinstance(self.end, InvalidArgument):
            if self.fits:
                raise Wrong(f"{self._name}: fits, but: {self.end}")
        elif must_be_whole or not isinstance(self.end, _FAILURES):
            raise Wrong(f"{self._name}: {type(self.end).__name__}: {self.end}")

    def _check_whole(self, end: public.Finished) -> None:
        heard = list(zip(self.heard, self.text, strict=True))
        if heard != [(answer.token_ids, answer.text) for answer in self.truth]:
            raise Wrong(f"{self._name}: finished with {heard}, the truth is {self.truth}")
        usage = (end.usage.prompt_tokens, end.usage.output_tokens)
        num_output_tokens = sum(
            len(answer.token_ids) + answer.num_untold_tokens for answer in self.truth
        )
        if usage != (len(self.ask.request.prompt_token_ids), num_output_tokens):
            raise Wrong(f"{self._name}: usage {usage}")
        stop = self.truth[-1].stopped_by  # others than beams end alike, or alone
        reason = public.FINISH_REASON_STOP if stop else public.FINISH_REASON_LENGTH
        if (end.finish_reason, end.stop_reason) != (reason, stop):
            raise Wrong(f"{self._name}: ended by {end.finish_reason} {end.stop_reason!r}")

    @property
    def _name(self) -> str:
        return f"client {self.ask.request.request_id}"
