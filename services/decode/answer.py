"""What one client reads: text, token ids and exactly one terminal event.

Everything here is a pure function of (parameters, prompt ids, output ids), so an answer that
moves to another instance is rebuilt from them. The last tokens travel in the terminal event: an
answer whose end was lost is never mistaken for one that has still to go on.

Knows nothing of KV, of the engine or of the wire. Made by the decode service for every request.
"""

import asyncio
import time
from collections.abc import Callable

from engine.plan import Sampled
from engine.request import FinishReason, Request
from engine.text import Detokenizer, StopChecker
from engine.tokenizer import Tokenizer
from protos import inference_pb2 as public
from protos import worker_pb2 as wire
from services.runtime.errors import ServiceError
from services.runtime.work import logprobs_message

FINISH_REASONS = {
    FinishReason.STOP: public.FINISH_REASON_STOP,
    FinishReason.LENGTH: public.FINISH_REASON_LENGTH,
    FinishReason.ABORT: public.FINISH_REASON_ABORT,
    FinishReason.ERROR: public.FINISH_REASON_ERROR,
}


def failed_event(request_id: str, error: ServiceError) -> wire.DecodeEvent:
    """The terminal event of a request that has no answer."""
    failed = wire.WorkFailed(code=error.grpc_code_number, message=str(error))
    return wire.DecodeEvent(request_id=request_id, failed=failed)


class Answer:
    """The output of one request, from its first token to its terminal event."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        emit: Callable[[wire.DecodeEvent], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request = request
        self._emit = emit
        self._clock = clock
        self._started_s = clock()
        self._first_token_s: float | None = None
        self._first_decode_s = 0.0
        self._prefilled_s: float | None = None
        self.num_output_tokens = len(request.output_token_ids)
        self._detokenizer = Detokenizer(
            tokenizer, request.prompt_token_ids, request.sampling.skip_special_tokens
        )
        self._stops = StopChecker(request.sampling.stop, request.sampling.include_stop)
        for number, token_id in enumerate(request.output_token_ids, 1):
            # As an earlier attempt pushed them: what it held back of their text is held here, too.
            self._text(token_id, number)
        self._has_told_prompt = False
        self.queue_s = 0.0
        """Received here -> picked by the scheduler; for a prompt prefilled here."""
        self.num_cached_tokens = 0
        """Prompt tokens that nobody had to compute."""
        self.prefilled_here = False
        self.ended = asyncio.Event()

    def push(self, sampled: Sampled) -> None:
        """Take one sampled token; ends the answer where the token or its text says so."""
        if self.ended.is_set():
            return  # the engine may be a step ahead of a stop string
        self._note_time()
        prompt_logprobs = self._told_prompt(sampled)
        reason = sampled.finish_reason
        stop_reason = ""
        if reason is FinishReason.STOP:
            stop_reason = self._stop_reason(sampled.token_id)
            if not self._request.sampling.include_stop:
                self._finish(FinishReason.STOP, stop_reason, prompt_logprobs)
                return
        self.num_output_tokens += 1
        text, matched = self._text(sampled.token_id, self.num_output_tokens)
        if reason is not None and matched is None:
            tail, matched = self._tail()
            text += tail
        tokens = public.Tokens(
            token_ids=[sampled.token_id], text=text, prompt_logprobs=prompt_logprobs
        )
        if sampled.logprobs is not None and self._request.sampling.logprobs is not None:
            tokens.logprobs.append(logprobs_message(sampled.logprobs))
        if matched is not None:
            self._end(FinishReason.STOP, matched, tokens)
        elif reason is not None:
            self._end(reason, stop_reason, tokens)
        else:
            self._emit(wire.DecodeEvent(request_id=self._request.request_id, tokens=tokens))

    def cut_short(self, reason: str) -> None:
        """It cannot go on: it ends with ERROR after what it has said, unless it has ended."""
        if not self.ended.is_set():
            self._finish(FinishReason.ERROR, reason, [])

    def picked(self, num_cached_tokens: int) -> None:
        """The scheduler gave a prompt that is prefilled here its blocks."""
        if not self.prefilled_here:
            self.prefilled_here = True
            self.queue_s = self._clock() - self._started_s
            self.num_cached_tokens = num_cached_tokens

    def prefilled(self) -> None:
        """A prompt that is prefilled here has been read, though no token of its answer is told."""
        self._prefilled_s = self._prefilled_s or self._clock()

    def fail(self, error: ServiceError) -> None:
        """End without an answer, unless it has ended."""
        if not self.ended.is_set():
            self.ended.set()
            self._emit(failed_event(self._request.request_id, error))

    def _text(self, token_id: int, number: int) -> tuple[str, str | None]:
        """The text that may be sent after the ``number``-th token, and the stop string it ends."""
        text = self._detokenizer.push([token_id])
        if number < self._request.sampling.min_tokens:
            return text, None
        return self._stops.push(text)

    def _told_prompt(self, sampled: Sampled) -> list[public.TokenLogprobs]:
        """With the first token: one for each of the prompt; nothing comes before the first."""
        if not self._request.tells_prompt or self._has_told_prompt:
            return []
        self._has_told_prompt = True
        first = public.TokenLogprob(token_id=self._request.prompt_token_ids[0])
        records = [logprobs_message(record) for record in sampled.prompt_logprobs]
        return [public.TokenLogprobs(token=first), *records]

    def _note_time(self) -> None:
        now_s = self._clock()
        if self._first_token_s is None:
            self._first_token_s = now_s
        elif not self._first_decode_s:
            self._first_decode_s = now_s - self._first_token_s

    def _stop_reason(self, token_id: int) -> str:
        asked = token_id in self._request.sampling.stop_token_ids
        return str(token_id) if asked else ""

    def _tail(self) -> tuple[str, str | None]:
        """Text that was held back, now that nothing follows."""
        text, matched = self._stops.push(self._detokenizer.flush())
        return (text, matched) if matched is not None else (text + self._stops.flush(), None)

    def _finish(
        self,
        reason: FinishReason,
        stop_reason: str,
        prompt_logprobs: list[public.TokenLogprobs],
    ) -> None:
        text, matched = self._tail()
        last = public.Tokens(text=text, prompt_logprobs=prompt_logprobs)
        self._end(FinishReason.STOP if matched else reason, matched or stop_reason, last)

    def _end(self, reason: FinishReason, stop_reason: str, last: public.Tokens) -> None:
        self.ended.set()
        prefilled_s = self._prefilled_s or self._first_token_s or self._clock()
        prefill_s = prefilled_s - self._started_s - self.queue_s if self.prefilled_here else 0.0
        finished = wire.DecodeFinished(
            finish_reason=FINISH_REASONS[reason],
            stop_reason=stop_reason,
            output_tokens=self.num_output_tokens,
            cached_tokens=self.num_cached_tokens,
            queue_s=self.queue_s,
            prefill_s=prefill_s,
            first_decode_s=self._first_decode_s,
            last=last,
        )
        self._emit(wire.DecodeEvent(request_id=self._request.request_id, finished=finished))
