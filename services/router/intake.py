"""From what a client sent to a typed request: everything is checked here, once.

Both faces bring a ``RawRequest``; out comes an ``engine.request.Request`` whose every field is
valid, or an error that names the field as the client spells it. Nothing behind this re-checks.
Knows nothing of gRPC or JSON. Used by ``inference`` and ``openai_api``.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.errors import InvalidRequest
from engine.request import Request, SamplingParams
from engine.tokenizer import check_text
from services.router.served_model import ServedModel
from services.runtime.errors import InvalidArgument

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
"""Of one stop string."""
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 2.0
MAX_CHAT_MESSAGES = 4096
MAX_CLIENT_ID_CHARACTERS = 256
SEEDS = 2**64
TOO_LONG_CODE = "context_length_exceeded"
CHAT_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_PRIORITIES = range(-(2**31), 2**31)


@dataclass(frozen=True, slots=True)
class RawSampling:
    """As the client sent it; None: unset."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages instead of a prompt."""

    turns: tuple[ChatTurn, ...]


Prompt = str | Sequence[int] | Chat


@dataclass(frozen=True, slots=True)
class RawRequest:
    """As the client sent it."""

    prompt: Prompt
    prompt_field: str
    """What the client calls it: names it in errors, like the next."""
    field_prefix: str = ""
    """Before names of sampling fields."""
    max_tokens_field: str = "max_tokens"
    model: str = ""
    """Empty: the model that is served."""
    sampling: RawSampling = field(default_factory=RawSampling)
    default_max_tokens: int | None = None
    """None: what is left of the context."""
    priority: int = 0


def check_number_of_messages(count: int, name: str) -> None:
    """For faces: before they take the messages apart.

    Raises:
        InvalidArgument: there are too many.
    """
    if count > MAX_CHAT_MESSAGES:
        raise InvalidArgument(name, f"{count} messages, {MAX_CHAT_MESSAGES} are allowed")


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
        # Cheap checks first: a prompt is only encoded for a request that can be served.
        sampling = self._sampling(raw)
        if raw.priority not in _PRIORITIES:
            raise InvalidArgument("priority", "must fit in 32 bits")
        if not isinstance(raw.prompt, (str, Chat)):
            _room(len(raw.prompt), raw.prompt_field, max_context)
        token_ids = await self.token_ids(raw.prompt, raw.prompt_field)
        room = _room(len(token_ids), raw.prompt_field, max_context)
        wanted = raw.sampling.max_tokens or raw.default_max_tokens or room
        return Request(
            request_id=new_request_id(),
            prompt_token_ids=tuple(token_ids),
            sampling=replace(sampling, max_tokens=min(wanted, room)),
            priority=raw.priority,
        )

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
                token_ids = await self._model.encode_chat(_messages(prompt, name))
            else:
                token_ids = prompt
                self._check_vocabulary(token_ids, name)
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
            num_characters = sum(len(turn.content) for turn in prompt.turns)
        else:
            return
        if num_characters > self._model.max_prompt_characters:
            raise InvalidArgument(
                name,
                f"is {num_characters} characters long, "
                f"more than fit the context of {self._model.max_context} tokens",
                code=TOO_LONG_CODE,
            )

    def _check_vocabulary(self, token_ids: Sequence[int], name: str) -> None:
        last = self._model.vocab_size - 1
        for token_id in token_ids:
            if not 0 <= token_id <= last:
                raise InvalidArgument(name, f"token id {token_id} is not in 0 to {last}")

    def _sampling(self, raw: RawRequest) -> SamplingParams:
        """All but ``max_tokens``, which depends on the prompt's length."""
        given, prefix = raw.sampling, raw.field_prefix
        temperature = 1.0 if given.temperature is None else given.temperature
        if not 0 <= temperature <= MAX_TEMPERATURE:  # also refuses NaN
            raise InvalidArgument(
                f"{prefix}temperature", f"{temperature:g} is not in 0 to {MAX_TEMPERATURE:g}"
            )
        top_p = 1.0 if given.top_p is None else given.top_p
        if not 0 < top_p <= 1:
            raise InvalidArgument(f"{prefix}top_p", f"{top_p:g} is not over 0 and at most 1")
        if given.max_tokens is not None and given.max_tokens < 1:
            raise InvalidArgument(
                prefix + raw.max_tokens_field, f"{given.max_tokens} is less than 1"
            )
        self._check_stops(given, prefix)
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=_top_k(given.top_k, prefix),
            seed=_seed(given.seed, prefix),
            stop=tuple(given.stop),
            stop_token_ids=tuple(given.stop_token_ids),
            ignore_eos=given.ignore_eos,
            skip_special_tokens=given.skip_special_tokens,
        )

    def _check_stops(self, given: RawSampling, prefix: str) -> None:
        name = f"{prefix}stop"
        if len(given.stop) > MAX_STOP_STRINGS:
            raise InvalidArgument(
                name, f"{len(given.stop)} stop strings, {MAX_STOP_STRINGS} are allowed"
            )
        for stop in given.stop:
            if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
                raise InvalidArgument(
                    name,
                    f"a stop string has {len(stop)} characters, not 1 to {MAX_STOP_CHARACTERS}",
                )
            try:
                check_text(stop, name)
            except InvalidRequest as error:
                raise InvalidArgument(name, error.reason) from error
        name = f"{prefix}stop_token_ids"
        if len(given.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidArgument(
                name, f"{len(given.stop_token_ids)} ids, {MAX_STOP_TOKEN_IDS} are allowed"
            )
        self._check_vocabulary(given.stop_token_ids, name)


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


def _top_k(given: int | None, prefix: str) -> int:
    top_k = given or 0
    if not 0 <= top_k < 2**31:
        raise InvalidArgument(f"{prefix}top_k", f"{top_k} is not 0 or a small positive number")
    return top_k


def _seed(given: int | None, prefix: str) -> int:
    """Drawn where unset. Negative seeds, which some clients send, count from the other end."""
    if given is None:
        return secrets.randbelow(SEEDS)
    if not -SEEDS // 2 <= given < SEEDS:
        raise InvalidArgument(f"{prefix}seed", "must fit in 64 bits")
    return given % SEEDS


def _messages(chat: Chat, name: str) -> list[Mapping[str, str]]:
    turns = chat.turns
    for index, turn in enumerate(turns):
        if turn.role not in CHAT_ROLES:
            raise InvalidArgument(
                f"{name}[{index}].role",
                f"{turn.role[:50]!r} is none of {', '.join(sorted(CHAT_ROLES))}",
            )
    # What OpenAI now calls developer, templates know as system.
    return [
        {"role": "system" if t.role == "developer" else t.role, "content": t.content} for t in turns
    ]
