"""What OpenAI clients send, as types; out of it comes what the intake takes.

Fields that would change the answer and are not supported are refused by name (``REFUSED``);
other fields that nobody here knows are ignored, as OpenAI's own clients expect of new ones.
Knows nothing of HTTP. Used by ``openai_api``.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict

from engine.request import Guide
from services.router.intake import Prompt, RawRequest
from services.router.openai_guides import guide_of
from services.router.openai_messages import EXPECTED, ChatFields, Listed
from services.router.sampling import RawSampling, Spelling
from services.router.several import RawBeamSearch
from services.runtime.errors import InvalidArgument

COMPLETION_DEFAULT_MAX_TOKENS = 16
"""OpenAI's own default for ``/v1/completions``."""
_MOST_DIGITS = 10
"""Of a token id."""
MAX_PROMPTS = 64
"""Prompts in one completions request."""
MAX_CHOICES = 128
"""Answers to all of them together."""


def _unset(value: Any) -> bool:
    return value is None or value is False or value == [] or value == {} or value == ""


def _one(value: Any) -> bool:
    return value is None or (value == 1 and not isinstance(value, bool))


def _zero(value: Any) -> bool:
    return value is None or (value == 0 and not isinstance(value, bool))


def _text_only(value: Any) -> bool:
    return value is None or value == ["text"]


REFUSED: Mapping[str, Callable[[Any], bool]] = {
    "best_of": _one,
    "echo": _unset,
    "suffix": _unset,
    "functions": _unset,
    "modalities": _text_only,
    "audio": _unset,
    "web_search_options": lambda value: value is None,
    "allowed_token_ids": _unset,
    "logits_processors": _unset,
    "prompt_embeds": _unset,
    "truncate_prompt_tokens": lambda value: value is None,
    "chat_template": _unset,
    "documents": _unset,
}
"""Field -> whether a value asks for nothing special. Any other value is refused."""


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class _Body(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Listed[str] | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Raises: InvalidArgument: names the first field that is not supported."""
        extra = self.model_extra or {}
        for name, asks_nothing in REFUSED.items():
            if name in extra and not asks_nothing(extra[name]):
                raise InvalidArgument(name, "this value is not supported")
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options", "is only allowed when stream is true")
        if self.use_beam_search and self.stream:
            raise InvalidArgument("stream", "cannot go with a beam search: it ends all at once")
        if not self.use_beam_search:
            asked = (self.beam_width, self.early_stopping, self.length_penalty not in (None, 1))
            for name, value in zip(_OF_BEAMS, asked, strict=True):
                if value:
                    raise InvalidArgument(name, "is only allowed when use_beam_search is true")

    def sampling(
        self, max_tokens: int | None, logprobs: int | None, guide: Guide | None
    ) -> RawSampling:
        """Raises: InvalidArgument: a key of ``logit_bias`` that is no token id."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return RawSampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            n=self.n,
            beam_search=self._beam_search(),
            max_tokens=max_tokens,
            stop=stop,
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            min_p=self.min_p,
            typical_p=self.typical_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={_token_id(key): value for key, value in (self.logit_bias or {}).items()},
            min_tokens=self.min_tokens,
            include_stop=bool(self.include_stop_str_in_output),
            bad_words=self.bad_words or (),
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            guide=guide,
        )

    def _beam_search(self) -> RawBeamSearch | None:
        if not self.use_beam_search:
            return None
        return RawBeamSearch(self.beam_width, self.length_penalty, bool(self.early_stopping))


class CompletionBody(_Body):
    """``POST /v1/completions``."""

    prompt: str | Listed[int] | Listed[str] | Listed[Listed[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    @property
    def echoes_only(self) -> bool:
        """The prompt is to be scored and nothing to be written; one token is, and is not told."""
        answers = (self.n or 1, self.best_of or 1, self.beam_width or 1)
        return bool(self.echo) and self.max_tokens == 0 and max(answers) == 1

    def check(self) -> None:
        super().check()
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise InvalidArgument("best_of", "cannot be streamed: the best are known at the end")

    def raw_requests(self) -> list[RawRequest]:
        """One request for each prompt.

        Raises:
            InvalidArgument: no prompts, or too many, or two guides.
        """
        prompts = _prompts(self.prompt)
        if len(prompts) > MAX_PROMPTS:
            raise InvalidArgument("prompt", f"{len(prompts)} prompts, {MAX_PROMPTS} are allowed")
        asked = {"n": self.n, "best_of": self.best_of, "beam_width": self.beam_width}
        for name, count in asked.items():
            if len(prompts) * (count or 1) > MAX_CHOICES:
                told = f"{count} answers to {len(prompts)} prompts"
                raise InvalidArgument(name, f"{told}, {MAX_CHOICES} in all are allowed")
        guide, guide_field = guide_of(self)
        max_tokens = 1 if self.echoes_only else self.max_tokens
        sampling = self.sampling(max_tokens, self.logprobs, guide)
        sampling = replace(sampling, best_of=self.best_of)
        renamed = {**_RENAMED, "guided": guide_field}
        if self.echo and self.logprobs is not None:
            # What is echoed is told like what is written.
            if sampling.prompt_logprobs is None:
                renamed["prompt_logprobs"] = "logprobs"
            most = max(sampling.prompt_logprobs or 0, self.logprobs)
            sampling = replace(sampling, prompt_logprobs=most)
        return [
            RawRequest(
                prompt=prompt,
                prompt_field="prompt" if len(prompts) == 1 else f"prompt[{index}]",
                spelling=Spelling(renamed=renamed),
                model=self.model or "",
                sampling=sampling,
                default_max_tokens=COMPLETION_DEFAULT_MAX_TOKENS,
                priority=self.priority or 0,
                salt=self.cache_salt or "",
                echo=bool(self.echo),
            )
            for index, prompt in enumerate(prompts)
        ]


class ChatBody(_Body, ChatFields):
    """``POST /v1/chat/completions``."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def raw_requests(self) -> list[RawRequest]:
        """The one request.

        Raises:
            InvalidArgument: names what is wrong with the chat.
        """
        chat = self.chat()
        newer = self.max_completion_tokens is not None
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument("top_logprobs", "is only allowed when logprobs is true")
        guide, guide_field = guide_of(self)
        renamed = {"logprobs": "top_logprobs", "guided": guide_field}
        if newer:
            renamed["max_tokens"] = "max_completion_tokens"
        max_tokens = self.max_completion_tokens if newer else self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        raw = RawRequest(
            prompt=chat,
            prompt_field="messages",
            spelling=Spelling(renamed={**_RENAMED, **renamed}),
            model=self.model or "",
            sampling=self.sampling(max_tokens, logprobs, guide),
            priority=self.priority or 0,
            salt=self.cache_salt or "",
        )
        return [raw]


BodyType = TypeVar("BodyType", CompletionBody, ChatBody)

_EXPECTED = {
    **EXPECTED,
    "prompt": "must be a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "must be a string or a list of strings",
}


def parse_body(kind: type[BodyType], data: bytes) -> BodyType:
    """A request's body as its type, with everything that is not supported refused.

    Raises:
        InvalidArgument: names the field.
    """
    try:
        body = kind.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise _explained(error) from None
    body.check()
    return body


def _explained(error: pydantic.ValidationError) -> InvalidArgument:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return InvalidArgument("", "the body is not valid JSON")
    path = ""
    for step in first["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif (expected := _EXPECTED.get(step)) and not _goes_deeper(step, first["loc"]):
            missing = first["type"] == "missing" and step == first["loc"][-1]
            name = f"{path}.{step}" if path else step
            return InvalidArgument(name, "is missing" if missing else expected)
        else:
            path += f".{step}" if path else step
    reason = "is missing" if first["type"] == "missing" else first["msg"].lower()
    return InvalidArgument(path, reason)


def _goes_deeper(step: str, loc: tuple[int | str, ...]) -> bool:
    """The error is about a part of a chat, not about all of it."""
    return step in ("messages", "tools") and loc[-1] != step


_RENAMED = {
    "include_stop": "include_stop_str_in_output",
    "beam_search": "use_beam_search",
    "beam_search.width": "beam_width",
    "beam_search.length_penalty": "length_penalty",
}
_OF_BEAMS = ("beam_width", "early_stopping", "length_penalty")


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit()) or len(key) > _MOST_DIGITS:
        raise InvalidArgument("logit_bias", f"{key[:50]!r} is not a token id")
    return int(key)


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    """The prompts of one request; an empty list is one empty prompt."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [each for each in prompt if isinstance(each, int)]
    whole: list[Prompt] = [each for each in prompt if not isinstance(each, int)]
    return whole or [ids]
