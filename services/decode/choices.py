"""All answers to one request: each is written alone, together they end once.

One answer passes through unchanged. Several are told as they come, each token with the answer's
index, each answer's end when it comes. Where more are written than told (``best_of``, beams),
nothing is told before all have ended: then the best are, whole. The request's one terminal event
has the totals. Knows nothing of KV or of the engine. Made by the decode service for every request.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.beams import Hypothesis
from engine.plan import Sampled
from engine.request import Request
from engine.tokenizer import Tokenizer
from protos import inference_pb2 as public
from protos import worker_pb2 as wire
from services.decode.answer import Answer
from services.decode.ranking import Kept
from services.runtime.errors import Internal, ServiceError


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
        sampling = request.sampling
        self._is_search = sampling.beam_search is not None
        self._is_ranked = sampling.is_ranked
        # Of a search as many end as are told.
        count = sampling.n if self._is_search else sampling.num_candidates
        is_single = count == 1 and not self._is_ranked
        # The prompt is told once, with the first answer.
        other = replace(request, sampling=replace(sampling, prompt_logprobs=None))
        self._answers = [
            Answer(
                other if index else request,
                tokenizer,
                emit if is_single else self._sink(index),
                clock,
            )
            for index in range(count)
        ]
        self._kept = [Kept() for _ in self._answers]
        self._num_ended = 0
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
        if self._is_ranked and not answer.ended.is_set():
            self._kept[index].count(sampled)
        answer.push(sampled)
        return answer.ended.is_set()

    def cut_short(self, index: int, reason: str) -> None:
        """An answer cannot go on: it ends with ERROR after what it has said."""
        self._answers[index].cut_short(reason)

    def searching(self) -> None:
        """The prompt, which is prefilled here, has been read."""
        for answer in self._answers:
            answer.prefilled()

    def found(self, hypotheses: Sequence[Hypothesis]) -> None:
        """A search has ended with these, the best first."""
        request_id = self._request.request_id
        if len(hypotheses) < len(self._answers):
            self.fail(Internal(f"a beam search found only {len(hypotheses)} answers"))
        for answer, kept, each in zip(self._answers, self._kept, hypotheses, strict=False):
            kept.cumulative_logprob = each.cumulative_logprob
            for token_id in each.token_ids[:-1]:
                answer.push(Sampled(request_id, token_id, None))
            answer.push(Sampled(request_id, each.token_ids[-1], each.finish_reason))

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
        if self._is_ranked:
            self._kept[index].take(tokens)
            return
        tokens.index = index
        self._emit(wire.DecodeEvent(request_id=self._request.request_id, tokens=tokens))

    def _end(self, index: int, finished: wire.DecodeFinished) -> None:
        if self._has_failed:
            return
        if finished.last.ByteSize():
            self._tell(index, finished.last)
        self._kept[index].finished = finished
        self._num_ended += 1
        if not self._is_ranked:
            self._tell_end(index, self._kept[index])
        if self._num_ended < len(self._answers):
            return
        if self._is_ranked:
            self._tell_best()
        totals = self._totals(finished)
        self._emit(wire.DecodeEvent(request_id=self._request.request_id, finished=totals))

    def _tell_best(self) -> None:
        """Those of a search are in order; of others the most probable are best, token for token."""
        best = self._kept
        if not self._is_search:
            best = sorted(best, key=lambda kept: -kept.mean_logprob)
        request_id = self._request.request_id
        prompt = list(self._kept[0].tokens.prompt_logprobs)
        self._kept[0].tokens.ClearField("prompt_logprobs")
        best[0].tokens.prompt_logprobs.extend(prompt)
        for index, kept in enumerate(best[: self._request.sampling.n]):
            kept.tokens.index = index
            self._emit(wire.DecodeEvent(request_id=request_id, tokens=kept.tokens))
            self._tell_end(index, kept)

    def _tell_end(self, index: int, kept: Kept) -> None:
        finished = kept.finished
        assert finished is not None
        choice = public.ChoiceFinished(
            index=index,
            finish_reason=finished.finish_reason,
            stop_reason=finished.stop_reason,
            output_tokens=finished.output_tokens,
            cumulative_logprob=kept.cumulative_logprob,
        )
        event = wire.DecodeEvent(request_id=self._request.request_id, choice_finished=choice)
        self._emit(event)

    def _totals(self, last: wire.DecodeFinished) -> wire.DecodeFinished:
        """As the last answer ended; tokens are those of all."""
        totals = wire.DecodeFinished()
        totals.CopyFrom(last)
        totals.ClearField("last")
        totals.output_tokens = self.num_output_tokens
        return totals
