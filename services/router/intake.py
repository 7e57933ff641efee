"""From what a client sent to a typed request: everything is checked here, once.

Both faces bring a ``RawRequest``; out comes an ``engine.request.Request`` whose every field is
valid, or an error that names the field as the client spells it. Nothing behind this re-checks.
Knows nothing of gRPC or JSON. Used by ``inference`` and ``openai_api``.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.errors import InvalidRequest
from engine.request import Request
from services.router.chats import Chat, ToolChoice, check_chat
from services.router.sampling import (
    RawSampling,
    Spelling,
    check_prompt_logprobs,
    check_vocabulary,
    parse_sampling,
)
from services.router.served_model import ServedModel
from services.runtime.errors import InvalidArgument

MAX_CLIENT_ID_CHARACTERS = 256
MAX_SALT_CHARACTERS = 256
TOO_LONG_CODE = "context_length_exceeded"
_PRIORITIES = range(-(2**31), 2**31)


Prompt = str | Sequence[int] | Chat


@dataclass(frozen=True, slots=True)
class RawRequest:
    """As the client sent it."""

    prompt: Prompt
    prompt_field: str
    """What the client calls it: names it in errors, like the next."""
    spelling: Spelling = field(default_factory=Spelling)
    """How it calls the fields of ``sampling``."""
    model: str = ""
    """Empty: the model that is served."""
    sampling: RawSampling = field(default_factory=RawSampling)
    default_max_tokens: int | None = None
    """None: what is left of the context."""
    priority: int = 0
    salt: str = ""
    """Equal prompts share a prefix cache only under equal salts."""
    echo: bool = False
    """The text of the answer begins with the prompt."""


def new_request_id() -> str:
    """Unique in the cluster, whatever ids clients choose."""
    return secrets.token_hex(12)


def check_client_id(client_request_id: str) -> str:
    """A client's id is only echoed, so all it must be is short.

    Raises:
        InvalidArgument: it is not.
    """
    if len(client_request_id) > MAX_CLIENT_ID_CHARACTERS:
        raise InvalidArgument(
            "client_request_id", f"is longer than {MAX_CLIENT_ID_CHARACTERS} characters"
        )
    return client_request_id


def check_salt(salt: str) -> str:
    """Raises: InvalidArgument: it is longer than any sensible one."""
    if len(salt) > MAX_SALT_CHARACTERS:
        raise InvalidArgument("cache_salt", f"is longer than {MAX_SALT_CHARACTERS} characters")
    return salt


class Intake:
    """Parses requests for one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def parse(self, raw: RawRequest, max_context: int) -> Request:
        """The typed request.

        Args:
            max_context: most tokens of prompt and answer that the cluster can hold.

        Raises:
            NotFound: the model is not served here.
            InvalidArgument: names the field.
        """
        if raw.model:
            self._model.check_name(raw.model)
        if isinstance(raw.prompt, Chat):
            raw = self._with_tools(raw, raw.prompt)
        # Cheap checks first: a prompt is only encoded for a request that can be served.
        sampling = parse_sampling(
            raw.sampling, raw.spelling, self._model.tokenizer, self._model.vocab_size
        )
        if raw.priority not in _PRIORITIES:
            raise InvalidArgument("priority", "must fit in 32 bits")
        if not isinstance(raw.prompt, (str, Chat)):
            _room(len(raw.prompt), raw.prompt_field, max_context)
        if sampling.guide is not None:
            await self._model.check_guide(sampling.guide, raw.spelling("guided"))
        token_ids = await self.token_ids(raw.prompt, raw.prompt_field)
        room = _room(len(token_ids), raw.prompt_field, max_context)
        check_prompt_logprobs(sampling, len(token_ids), raw.spelling("prompt_logprobs"))
        wanted = raw.sampling.max_tokens or raw.default_max_tokens or room
        return Request(
            request_id=new_request_id(),
            prompt_token_ids=tuple(token_ids),
            sampling=replace(sampling, max_tokens=min(wanted, room)),
            priority=raw.priority,
            salt=check_salt(raw.salt),
        )

    def _with_tools(self, raw: RawRequest, chat: Chat) -> RawRequest:
        """What the tools of a chat mean to how its answer is sampled."""
        if not chat.offered:
            return raw
        sampling, spelling = raw.sampling, raw.spelling
        if self._model.tool_marker_ids:
            sampling = replace(sampling, skip_special_tokens=False)
        if chat.tool_choice is ToolChoice.REQUIRED:
            if sampling.guide is not None:
                raise InvalidArgument(spelling("guided"), "cannot go with a required tool call")
            sampling = replace(sampling, guide=self._model.forcing_guide(chat))
            spelling = replace(spelling, renamed={**spelling.renamed, "guided": "tools"})
        return replace(raw, sampling=sampling, spelling=spelling)

    async def token_ids(self, prompt: Prompt, name: str) -> Sequence[int]:
        """Encode whatever kind of prompt it is.

        Raises:
            InvalidArgument: it is empty, or not what it should be.
        """
        if not (prompt.turns if isinstance(prompt, Chat) else prompt):
            raise InvalidArgument(name, "is empty")
        self._check_length(prompt, name)
        try:
            if isinstance(prompt, str):
                token_ids: Sequence[int] = await self._model.encode(prompt, name)
            elif isinstance(prompt, Chat):
                check_chat(prompt, name)
                token_ids = await self._model.encode_chat(prompt)
            else:
                token_ids = prompt
                check_vocabulary(token_ids, name, self._model.vocab_size)
        except InvalidRequest as error:
            raise InvalidArgument(name, error.reason) from error
        if not token_ids:
            raise InvalidArgument(name, "holds no token")
        return token_ids

    def _check_length(self, prompt: Prompt, name: str) -> None:
        """Encoding a text takes time and a hundred times its memory: not for one that is no use."""
        if isinstance(prompt, str):
            num_characters = len(prompt)
        elif isinstance(prompt, Chat):
            num_characters = prompt.num_characters
        else:
            return
        if num_characters > self._model.max_prompt_characters:
            raise InvalidArgument(
                name,
                f"is {num_characters} characters long, "
                f"more than fit the context of {self._model.max_context} tokens",
                code=TOO_LONG_CODE,
            )


def _room(num_tokens: int, name: str, max_context: int) -> int:
    """How many tokens an answer to so long a prompt may have."""
    if num_tokens >= max_context:
        raise InvalidArgument(
            name,
            f"is {num_tokens} tokens long; the context is {max_context} tokens, "
            f"so a prompt may have {max_context - 1} at most",
            code=TOO_LONG_CODE,
        )
    return max_context - num_tokens
