"""What a client may ask of sampling: every value is checked here, once.

A ``RawSampling`` is as the client sent it; out of it comes ``engine.request.SamplingParams``, or
an error that names the field as the client spells it. Knows nothing of prompts. Used by
``intake``.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from engine.errors import InvalidRequest
from engine.request import Guide, GuideKind, SamplingParams
from engine.tokenizer import Tokenizer, check_text
from services.router.several import RawBeamSearch, parse_several
from services.runtime.errors import InvalidArgument

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
"""Of one stop string."""
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 256
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 17
"""Of all tokens of a prompt together: they travel in one message, which clients limit to 4 MB."""
MAX_GUIDE_CHARACTERS = 65_536
MAX_CHOICES = 256
MAX_CHOICE_CHARACTERS = 256
MAX_TEMPERATURE = 2.0
MAX_REPETITION_PENALTY = 10.0
SEEDS = 2**64

Number = TypeVar("Number", int, float)


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
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int | None = None
    include_stop: bool = False
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    n: int | None = None
    best_of: int | None = None
    beam_search: RawBeamSearch | None = None
    prompt_logprobs: int | None = None
    guide: Guide | None = None


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one face calls the fields."""

    prefix: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Ours -> theirs, where they differ."""

    def __call__(self, name: str) -> str:
        return self.prefix + self.renamed.get(name, name)


def parse_sampling(
    given: RawSampling, spelled: Spelling, tokenizer: Tokenizer, vocab_size: int
) -> SamplingParams:
    """All but ``max_tokens``, which depends on the prompt's length.

    Raises:
        InvalidArgument: names the field.
    """
    if given.max_tokens is not None and given.max_tokens < 1:
        raise InvalidArgument(spelled("max_tokens"), f"{given.max_tokens} is less than 1")
    min_tokens = given.min_tokens or 0
    if min_tokens < 0 or (given.max_tokens is not None and min_tokens > given.max_tokens):
        raise InvalidArgument(spelled("min_tokens"), f"{min_tokens} is not in 0 to max_tokens")
    if given.guide is not None:
        _check_guide(given.guide, given.ignore_eos, spelled("guided"))
    _check_strings(
        given.stop, spelled("stop"), "stop string", MAX_STOP_STRINGS, MAX_STOP_CHARACTERS
    )
    check_vocabulary(
        _at_most(given.stop_token_ids, MAX_STOP_TOKEN_IDS, spelled("stop_token_ids"), "ids"),
        spelled("stop_token_ids"),
        vocab_size,
    )
    several = parse_several(given, spelled)
    temperature = _between(given.temperature, 1.0, 0, MAX_TEMPERATURE, spelled("temperature"))
    if several.beam_search is not None:
        _check_search(given, spelled)
    return SamplingParams(
        temperature=0.0 if several.beam_search is not None else temperature,
        top_p=_share(given.top_p, spelled("top_p")),
        top_k=_top_k(given.top_k, spelled("top_k")),
        seed=_seed(given.seed, spelled("seed")),
        stop=tuple(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        ignore_eos=given.ignore_eos,
        skip_special_tokens=given.skip_special_tokens,
        min_p=_between(given.min_p, 0.0, 0, 1, spelled("min_p")),
        typical_p=_share(given.typical_p, spelled("typical_p")),
        presence_penalty=_between(given.presence_penalty, 0.0, -2, 2, spelled("presence_penalty")),
        frequency_penalty=_between(
            given.frequency_penalty, 0.0, -2, 2, spelled("frequency_penalty")
        ),
        repetition_penalty=_repetition(given.repetition_penalty, spelled("repetition_penalty")),
        logit_bias=_bias(given.logit_bias, spelled("logit_bias"), vocab_size),
        min_tokens=min_tokens,
        include_stop=given.include_stop,
        bad_words=_bad_words(given.bad_words, spelled("bad_words"), tokenizer),
        logprobs=_logprobs(given.logprobs, spelled("logprobs")),
        n=several.n,
        best_of=several.best_of,
        beam_search=several.beam_search,
        prompt_logprobs=_logprobs(given.prompt_logprobs, spelled("prompt_logprobs")),
        guide=given.guide,
    )


def check_vocabulary(token_ids: Sequence[int], name: str, vocab_size: int) -> None:
    """Raises: InvalidArgument: an id that no token has."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument(name, f"token id {token_id} is not in 0 to {vocab_size - 1}")


def check_prompt_logprobs(sampling: SamplingParams, num_prompt_tokens: int, name: str) -> None:
    """Raises: InvalidArgument: there would be too many."""
    if sampling.prompt_logprobs is None:
        return
    count = num_prompt_tokens * (1 + sampling.prompt_logprobs)
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidArgument(
            name, f"asks for {count} logprobs of the prompt, {MAX_PROMPT_LOGPROBS} are allowed"
        )


def _check_search(given: RawSampling, spelled: Spelling) -> None:
    """Beams are whole answers, found by their probability alone."""
    asked: Mapping[str, object] = {
        "temperature": given.temperature,
        "stop": given.stop,
        "logprobs": given.logprobs is not None,
        "prompt_logprobs": given.prompt_logprobs is not None,
        "guided": given.guide,
    }
    for name, value in asked.items():
        if value:
            raise InvalidArgument(spelled(name), "cannot go with a beam search")


def _check_guide(guide: Guide, ignore_eos: bool, name: str) -> None:
    """What can be said of a guide without compiling it."""
    if ignore_eos:
        raise InvalidArgument(name, "cannot go with ignore_eos: EOS is how a guided answer ends")
    if guide.kind is GuideKind.CHOICE:
        if not guide.choices:
            raise InvalidArgument(name, "has no choices")
        _check_strings(guide.choices, name, "choice", MAX_CHOICES, MAX_CHOICE_CHARACTERS)
    elif guide.kind is not GuideKind.JSON_OBJECT:
        _check_strings((guide.source,), name, "guide", 1, MAX_GUIDE_CHARACTERS)


def _between(value: Number | None, unset: Number, low: float, high: float, name: str) -> Number:
    if value is None:
        return unset
    if not low <= value <= high:  # also refuses NaN
        raise InvalidArgument(name, f"{value:g} is not in {low:g} to {high:g}")
    return value


def _share(value: float | None, name: str) -> float:
    if value is None:
        return 1.0
    if not 0 < value <= 1:
        raise InvalidArgument(name, f"{value:g} is not over 0 and at most 1")
    return value


def _repetition(value: float | None, name: str) -> float:
    if value is None:
        return 1.0
    if not 0 < value <= MAX_REPETITION_PENALTY:
        raise InvalidArgument(
            name, f"{value:g} is not over 0 and at most {MAX_REPETITION_PENALTY:g}"
        )
    return value


def _top_k(given: int | None, name: str) -> int:
    top_k = given or 0
    if not 0 <= top_k < 2**31:
        raise InvalidArgument(name, f"{top_k} is not 0 or a small positive number")
    return top_k


def _seed(given: int | None, name: str) -> int:
    """Drawn where unset. Negative seeds, which some clients send, count from the other end."""
    if given is None:
        return secrets.randbelow(SEEDS)
    if not -SEEDS // 2 <= given < SEEDS:
        raise InvalidArgument(name, "must fit in 64 bits")
    return given % SEEDS


def _logprobs(given: int | None, name: str) -> int | None:
    if given is not None and not 0 <= given <= MAX_LOGPROBS:
        raise InvalidArgument(name, f"{given} is not in 0 to {MAX_LOGPROBS}")
    return given


def _bias(given: Mapping[int, float], name: str, vocab_size: int) -> tuple[tuple[int, float], ...]:
    _at_most(given, MAX_LOGIT_BIAS, name, "entries")
    check_vocabulary(tuple(given), name, vocab_size)
    for token_id, value in given.items():
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise InvalidArgument(
                name, f"{value:g} for token id {token_id} is not in -{MAX_BIAS:g} to {MAX_BIAS:g}"
            )
    return tuple(sorted(given.items()))


def _bad_words(
    given: Sequence[str], name: str, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], ...]:
    """As tokens, at the beginning of a word and inside one, where these differ."""
    _check_strings(given, name, "bad word", MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)
    found: dict[tuple[int, ...], None] = {}
    for word in given:
        for spelling in (word.lstrip(), f" {word.lstrip()}"):
            token_ids = tuple(tokenizer.encode(spelling, add_special_tokens=False, field=name))
            if token_ids:
                found[token_ids] = None
    return tuple(found)


def _check_strings(
    given: Sequence[str], name: str, what: str, max_count: int, max_characters: int
) -> None:
    _at_most(given, max_count, name, f"{what}s")
    for text in given:
        if not 0 < len(text) <= max_characters:
            raise InvalidArgument(
                name, f"a {what} has {len(text)} characters, not 1 to {max_characters}"
            )
        try:
            check_text(text, name)
        except InvalidRequest as error:
            raise InvalidArgument(name, error.reason) from error


Sized = TypeVar("Sized", Sequence[str], Sequence[int], Mapping[int, float])


def _at_most(given: Sized, most: int, name: str, what: str) -> Sized:
    if len(given) > most:
        raise InvalidArgument(name, f"{len(given)} {what}, {most} are allowed")
    return given
