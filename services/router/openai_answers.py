"""Answers in OpenAI's form: choices, chunks, usage, errors. Pure: events in, JSON objects out.

Knows nothing of HTTP or of where events come from. Used by ``openai_api``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.request import Request
from protos import inference_pb2 as public
from services.router.call_reader import CallReader, Text
from services.router.openai_calls import Calling, delta, message
from services.router.openai_logprobs import (
    Spell,
    chat_logprobs,
    completion_logprobs,
    num_characters,
    prompt_logprobs,
)
from services.router.serving import FINISH_REASON_NAMES
from services.runtime.errors import InvalidArgument, NotFound, ServiceError

Json = dict[str, Any]
Logprobs = Sequence[public.TokenLogprobs]


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come."""

    index: int
    request: Request
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: public.Finished | None = None
    logprobs: list[public.TokenLogprobs] = field(default_factory=list)
    text_offset: int = 0
    """Where the next streamed token begins, in characters."""
    calls: CallReader | None = None
    """Of an answer that may call tools."""
    echo: str | None = None
    """The prompt, where the answer begins with it; empty once it has been said."""
    prompt_logprobs: list[public.TokenLogprobs] = field(default_factory=list)

    @property
    def wants_logprobs(self) -> bool:
        return self.request.sampling.logprobs is not None

    def take_echo(self) -> str:
        """What of the prompt has still to be said."""
        if not self.echo:
            return ""
        text, self.echo = self.echo, ""
        return text

    def told(self, tokens: Sequence[public.TokenLogprobs], prompt: Logprobs) -> Logprobs:
        """What ``logprobs`` of a completion shows: of the prompt, too, where it is echoed."""
        return [*(prompt if self.echo is not None else ()), *tokens]

    def take(self, event: public.Accepted | public.Tokens | public.Finished) -> None:
        if isinstance(event, public.Finished):
            self.finished = event
        elif isinstance(event, public.Tokens):
            self.texts.append(event.text)
            self.token_ids.extend(event.token_ids)
            self.logprobs.extend(event.logprobs)
            self.prompt_logprobs.extend(event.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is the same in all parts of one response."""

    response_id: str
    created: int
    model: str
    system_fingerprint: str | None
    return_token_ids: bool
    include_usage: bool
    spell: Spell
    prompt_logprobs: int | None = None
    """How many alternatives to show of each prompt token; None: the prompt is not told."""

    def wrap(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }

    def of_prompt(self, records: Logprobs) -> Json:
        """``prompt_logprobs`` of a response, once there are any."""
        if self.prompt_logprobs is None or not records:
            return {}
        return {"prompt_logprobs": prompt_logprobs(records, self.spell, self.prompt_logprobs)}


def usage(choices: Sequence[Choice]) -> Json:
    """Tokens of all choices together."""
    parts = [choice.finished.usage for choice in choices if choice.finished]
    prompt = sum(part.prompt_tokens for part in parts)
    output = sum(part.output_tokens for part in parts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(part.cached_tokens for part in parts)},
    }


def count_rest(choices: Sequence[Choice], total: public.Usage) -> None:
    """Add to the first choice what belongs to none alone: the prompt, and answers not told."""
    told = sum(each.finished.usage.output_tokens for each in choices if each.finished)
    first = choices[0].finished
    assert first is not None
    first.usage.prompt_tokens = total.prompt_tokens
    first.usage.cached_tokens = total.cached_tokens
    first.usage.output_tokens += total.output_tokens - told


class CompletionForm:
    """``text_completion``."""

    id_prefix = "cmpl-"

    def whole(self, envelope: Envelope, choices: Sequence[Choice]) -> Json:
        parts = []
        for choice in choices:
            text = choice.take_echo() + "".join(choice.texts)
            part: Json = {"index": choice.index, "text": text, "logprobs": None}
            part |= _ending(choice) | envelope.of_prompt(choice.prompt_logprobs)
            if choice.wants_logprobs:
                records = choice.told(choice.logprobs, choice.prompt_logprobs)
                part["logprobs"] = self._logprobs(envelope, choice, records)
            if envelope.return_token_ids:
                part["prompt_token_ids"] = list(choice.request.prompt_token_ids)
                part["token_ids"] = choice.token_ids
            parts.append(part)
        return envelope.wrap("text_completion", parts) | {"usage": usage(choices)}

    def opening(self, envelope: Envelope, choice: Choice) -> Json | None:
        """The prompt's tokens, if wanted, come before any text."""
        if not envelope.return_token_ids:
            return None
        part = self._part(choice, "") | {
            "prompt_token_ids": list(choice.request.prompt_token_ids),
            "token_ids": [],
        }
        return envelope.wrap("text_completion", [part])

    def chunk(self, envelope: Envelope, choice: Choice, tokens: public.Tokens) -> Json:
        part = self._part(choice, choice.take_echo() + tokens.text)
        part |= envelope.of_prompt(tokens.prompt_logprobs)
        records = choice.told(tokens.logprobs, tokens.prompt_logprobs)
        if choice.wants_logprobs and records:
            part["logprobs"] = self._logprobs(envelope, choice, records)
        if envelope.return_token_ids:
            part["token_ids"] = list(tokens.token_ids)
        return envelope.wrap("text_completion", [part])

    def closing(self, envelope: Envelope, choice: Choice) -> Json:
        return envelope.wrap(
            "text_completion", [self._part(choice, choice.take_echo()) | _ending(choice)]
        )

    def usage_chunk(self, envelope: Envelope, choices: Sequence[Choice]) -> Json:
        return envelope.wrap("text_completion", []) | {"usage": usage(choices)}

    def _logprobs(self, envelope: Envelope, choice: Choice, records: Logprobs) -> Json:
        """Of the next tokens of the answer."""
        offset = choice.text_offset
        choice.text_offset += num_characters(records, envelope.spell)
        num_top = choice.request.sampling.logprobs or 0
        return completion_logprobs(records, envelope.spell, offset, num_top)

    def _part(self, choice: Choice, text: str) -> Json:
        return {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}


class ChatForm:
    """``chat.completion`` and its chunks.

    Args:
        calling: for answers that may call tools.
    """

    id_prefix = "chatcmpl-"

    def __init__(self, calling: Calling | None = None) -> None:
        self._calling = calling

    def whole(self, envelope: Envelope, choices: Sequence[Choice]) -> Json:
        parts = []
        for choice in choices:
            said = self._message(choice, "".join(choice.texts))
            part: Json = {"index": choice.index, "message": said, "logprobs": None}
            part |= _ending(choice)
            if choice.wants_logprobs:
                part["logprobs"] = chat_logprobs(choice.logprobs, envelope.spell)
            if envelope.return_token_ids:
                part["token_ids"] = choice.token_ids
            parts.append(part)
        result = envelope.wrap("chat.completion", parts) | {"usage": usage(choices)}
        result |= envelope.of_prompt(choices[0].prompt_logprobs)
        if envelope.return_token_ids:
            result["prompt_token_ids"] = list(choices[0].request.prompt_token_ids)
        return result

    def opening(self, envelope: Envelope, choice: Choice) -> Json | None:
        """The role comes before any text; the prompt's tokens with it, if wanted."""
        chunk = self._wrap(envelope, self._part(choice, {"role": "assistant", "content": ""}))
        if envelope.return_token_ids:
            chunk["prompt_token_ids"] = list(choice.request.prompt_token_ids)
        return chunk

    def chunk(self, envelope: Envelope, choice: Choice, tokens: public.Tokens) -> Json | None:
        """None: nothing to say yet, the text may become a call."""
        said = self._delta(choice, tokens.text)
        prompt = {} if choice.index else envelope.of_prompt(tokens.prompt_logprobs)
        if not (said or tokens.logprobs or prompt or envelope.return_token_ids):
            return None
        part = self._part(choice, said)
        if tokens.logprobs:
            part["logprobs"] = chat_logprobs(tokens.logprobs, envelope.spell)
        if envelope.return_token_ids:
            part["token_ids"] = list(tokens.token_ids)
        return self._wrap(envelope, part) | prompt

    def closing(self, envelope: Envelope, choice: Choice) -> Json:
        rest = self._delta(choice, "", ended=True)
        return self._wrap(envelope, self._part(choice, rest) | _ending(choice))

    def usage_chunk(self, envelope: Envelope, choices: Sequence[Choice]) -> Json:
        return envelope.wrap("chat.completion.chunk", []) | {"usage": usage(choices)}

    def _message(self, choice: Choice, text: str) -> Json:
        if self._calling is None:
            return message([Text(text)], str)
        choice.calls = self._calling.new_reader()
        parts = choice.calls.push(text) + choice.calls.end()
        return message(parts, self._calling.new_call_id)

    def _delta(self, choice: Choice, text: str, ended: bool = False) -> Json:
        if self._calling is None:
            return {} if ended else {"content": text}
        choice.calls = choice.calls or self._calling.new_reader()
        parts = choice.calls.end() if ended else choice.calls.push(text)
        return delta(parts, self._calling.new_call_id)

    def _wrap(self, envelope: Envelope, part: Json) -> Json:
        return envelope.wrap("chat.completion.chunk", [part])

    def _part(self, choice: Choice, delta: Json) -> Json:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}


Form = CompletionForm | ChatForm


def _ending(choice: Choice) -> Json:
    assert choice.finished is not None
    reason = FINISH_REASON_NAMES.get(choice.finished.finish_reason, "error")
    if reason == "stop" and choice.calls is not None and choice.calls.num_calls:
        reason = "tool_calls"
    return {"finish_reason": reason, "stop_reason": _stop_reason(choice)}


def _stop_reason(choice: Choice) -> str | int | None:
    """The stop string, or the stop token's id as a number; None: the model's own end, or length."""
    assert choice.finished is not None
    said, sampling = choice.finished.stop_reason, choice.request.sampling
    if said.isdigit() and said not in sampling.stop and int(said) in sampling.stop_token_ids:
        return int(said)
    return said or None


_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable",
    504: "timeout",
}


def error_object(error: ServiceError) -> Json:
    """An error's ``error`` member."""
    param = code = None
    if isinstance(error, InvalidArgument):
        param, code = error.field or None, error.code
    elif isinstance(error, NotFound):
        param, code = "model", "model_not_found"
    kind = _ERROR_TYPES.get(error.codes.http, "server_error")
    return error_body(str(error), kind, param, code or error.codes.label)


def error_body(message: str, kind: str, param: str | None, code: str) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
