"""All answers to one request: each is written alone, together they end once.

With one answer everything passes through unchanged. With several, tokens carry the answer's
index, each answer's end is told when it comes, and the request's one terminal event has the
totals. Knows nothing of KV or of the engine. Made by the decode service for every request.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from engine.plan import Sampled
from engine.request import Request
from engine.tokenizer import Tokenizer
from protos import inference_pb2 as public
from protos import worker_pb2 as wire
from services.decode.answer import Answer
from services.runtime.errors import ServiceError


class Choices:
    """The answers to one request, by index."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        emit: Callable[[wire.DecodeEvent], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request = request
        self._emit = emit
        count = request.sampling.num_candidates
        # The prompt is told once, with the first answer.
        other = replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
        self._answers = [
            Answer(
                other if index else request,
                tokenizer,
                self._sink(index) if count > 1 else emit,
                clock,
            )
            for index in range(count)
        ]
        self._finished: list[wire.DecodeFinished] = []
        self._has_failed = False

    @property
    def has_ended(self) -> bool:
        return all(answer.ended.is_set() for answer in self._answers)

    @property
    def num_output_tokens(self) -> int:
        """Of all answers together."""
        return sum(answer.num_output_tokens for answer in self._answers)

    async def ended(self) -> None:
        """Until the terminal event is out."""
        for answer in self._answers:
            await answer.ended.wait()

    def push(self, index: int, sampled: Sampled) -> bool:
        """Take a token of one answer; True when it has ended."""
        answer = self._answers[index]
        answer.push(sampled)
        return answer.ended.is_set()

    def picked(self, num_cached_tokens: int) -> None:
        """The scheduler gave the prompt, which is prefilled here, its blocks."""
        for answer in self._answers:
            answer.picked(num_cached_tokens)

    def landing(self, num_cached_tokens: int) -> None:
        """The prompt was prefilled elsewhere, where so many of its tokens were cached."""
        for answer in self._answers:
            answer.num_cached_tokens = num_cached_tokens

    def fail(self, error: ServiceError) -> None:
        """End without an answer, unless all have ended."""
        for answer in self._answers:
            answer.fail(error)

    def _sink(self, index: int) -> Callable[[wire.DecodeEvent], None]:
        return lambda event: self._take(index, event)

    def _take(self, index: int, event: wire.DecodeEvent) -> None:
        match event.WhichOneof("event"):
            case "tokens":
                self._tell(index, event.tokens)
            case "finished":
                self._end(index, event.finished)
            case "failed" if not self._has_failed:
                self._has_failed = True
                self._emit(event)

    def _tell(self, index: int, tokens: public.Tokens) -> None:
        tokens.index = index
        self._emit(wire.DecodeEvent(request_id=self._request.request_id, tokens=tokens))

    def _end(self, index: int, finished: wire.DecodeFinished) -> None:
        if self._has_failed:
            return
        if finished.last.ByteSize():
            self._tell(index, finished.last)
        choice = public.ChoiceFinished(
            index=index,
            finish_reason=finished.finish_reason,
            stop_reason=finished.stop_reason,
            output_tokens=finished.output_tokens,
        )
        request_id = self._request.request_id
        self._emit(wire.DecodeEvent(request_id=request_id, choice_finished=choice))
        self._finished.append(finished)
        if len(self._finished) == len(self._answers):
            self._emit(wire.DecodeEvent(request_id=request_id, finished=self._totals()))

    def _totals(self) -> wire.DecodeFinished:
        """As the last answer ended; tokens are those of all."""
        totals = wire.DecodeFinished()
        totals.CopyFrom(self._finished[-1])
        totals.ClearField("last")
        totals.output_tokens = sum(each.output_tokens for each in self._finished)
        return totals
