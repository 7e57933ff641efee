"""Which tokens a guide allows next: JSON schema, regular expression, grammar or choice.

The languages are llguidance's (Lark grammars over bytes, masks over tokens). A place in a language
is a pure function of (guide, output ids): matchers that are kept from step to step only save the
time to read an output again, and one that is missing, after a move or a preemption, is rebuilt.

Knows nothing of logits or steps. The router checks guides with it before anything is computed,
``choice`` asks it for masks.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import llguidance
import numpy as np
import numpy.typing as npt

from engine.errors import GuideLimit, InvalidRequest
from engine.request import Guide, GuideKind
from engine.tokenizer import Tokenizer

MAX_GRAMMARS = 64
"""Compiled grammars that are kept."""
MAX_MATCHERS = 512
"""Places in them that are kept; more guided sequences than that are read anew every step."""

_WHITESPACE = r"(\n[ ]{0,32}|[ ])?"
"""Between the parts of a JSON value. Bounded: a small model would go on with blanks for ever."""
_NOTHING_MAY_FOLLOW = "NoExtensionBias"
"""What llguidance calls an empty mask."""

Words = npt.NDArray[np.int32]
"""One bit a token, the lowest bit of the first word first: ``[ceil(vocab_size / 32)]``."""


class Guides:
    """The guides of one model. Any thread may check; masks are for one thread at a time."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._eos_token_ids = tokenizer.eos_token_ids
        self._num_words = (vocab_size + 31) // 32
        self._tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size)),
            n_vocab=vocab_size,
            eos_token=list(tokenizer.eos_token_ids),
        )
        self._grammars: OrderedDict[Guide, llguidance.LLMatcher] = OrderedDict()
        self._matchers: OrderedDict[str, tuple[Guide, llguidance.LLMatcher, int]] = OrderedDict()
        self._lock = Lock()

    def check(self, guide: Guide) -> None:
        """Compile it, and see what may come first.

        Raises:
            InvalidRequest: it is not in the language it claims to be in, or too complex.
        """
        matcher = self._beginning(guide).deep_copy()
        matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequest("", _one_line(matcher.get_error()))

    def mask(self, request_id: str, guide: Guide, output_token_ids: Sequence[int]) -> Words:
        """The tokens that may follow this output; EOS alone where the answer is complete.

        Args:
            request_id: its output only grows from one call to the next.

        Raises:
            GuideLimit: llguidance gave up (its grammars have limits that only show while an
                answer grows), or the output is not in the language.
        """
        matcher, num_read = self._place(request_id, guide, len(output_token_ids))
        new = list(output_token_ids[num_read:])
        if new and not matcher.consume_tokens(new):
            raise self._given_up(request_id, matcher)
        self._matchers[request_id] = (guide, matcher, len(output_token_ids))
        self._matchers.move_to_end(request_id)
        while len(self._matchers) > MAX_MATCHERS:
            self._matchers.popitem(last=False)
        words = np.frombuffer(matcher.compute_bitmask(), np.int32)[: self._num_words]
        if matcher.is_error():
            raise self._given_up(request_id, matcher)
        return words if words.any() else self._only_eos()

    def _given_up(self, request_id: str, matcher: llguidance.LLMatcher) -> GuideLimit:
        self._matchers.pop(request_id, None)
        return GuideLimit(f"the guide gave up: {_one_line(matcher.get_error())}")

    def _place(
        self, request_id: str, guide: Guide, num_tokens: int
    ) -> tuple[llguidance.LLMatcher, int]:
        """A matcher, and how much of the output it has read."""
        kept = self._matchers.get(request_id)
        if kept is not None and kept[0] == guide and kept[2] <= num_tokens:
            return kept[1], kept[2]
        return self._beginning(guide).deep_copy(), 0

    def _beginning(self, guide: Guide) -> llguidance.LLMatcher:
        with self._lock:
            if (known := self._grammars.get(guide)) is not None:
                self._grammars.move_to_end(guide)
                return known
        compiled = llguidance.LLMatcher(self._tokens, grammar_of(guide), log_level=0)
        if compiled.is_error():
            raise InvalidRequest("", _one_line(compiled.get_error()))
        with self._lock:
            self._grammars[guide] = compiled
            while len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return compiled

    def _only_eos(self) -> Words:
        words = np.zeros(self._num_words, np.uint32)
        for token_id in self._eos_token_ids:
            words[token_id // 32] |= np.uint32(1 << token_id % 32)
        return words.view(np.int32)


def grammar_of(guide: Guide) -> str:
    """A guide as llguidance reads it.

    Raises:
        InvalidRequest: a schema that is not JSON, or not an object.
    """
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            try:
                schema = json.loads(guide.source)
            except (ValueError, RecursionError):
                raise InvalidRequest("", "the schema is not valid JSON") from None
            if not isinstance(schema, dict):
                raise InvalidRequest("", "the schema is not a JSON object")
            return _of_schema(guide.source)
        case GuideKind.JSON_OBJECT:
            return _of_schema('{"type": "object"}')
        case GuideKind.REGEX:
            return str(llguidance.LLMatcher.grammar_from_regex(guide.source))
        case GuideKind.GRAMMAR:
            return str(llguidance.LLMatcher.grammar_from_lark(guide.source))
        case GuideKind.CHOICE:
            every = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in guide.choices)
            return str(llguidance.LLMatcher.grammar_from_lark(f"start: {every}"))


def _of_schema(schema: str) -> str:
    try:
        return str(
            llguidance.LLMatcher.grammar_from_json_schema(
                schema, {"whitespace_pattern": _WHITESPACE}
            )
        )
    except ValueError as error:
        raise InvalidRequest("", _one_line(str(error))) from None


def _one_line(error: str) -> str:
    """What llguidance says is wrong, without the dump of its state that may follow."""
    told = " ".join(error.partition("<state>")[0].split())[:300]
    return "it allows nothing to come next" if told == _NOTHING_MAY_FOLLOW else told


class _Vocabulary:
    """Our tokenizer as llguidance asks it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.special_token_ids = [i for i in range(vocab_size) if tokenizer.is_special(i)]
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        # SentencePiece puts a space before every text. What is asked here is the inside of one,
        # so it is read behind a character that merges with nothing.
        spelled = b"".join(tokenizer.token_bytes(token_id) for token_id in self._encode("{"))
        self._guard = "" if spelled == b"{" else "\x02"
        self._num_guard_tokens = len(self._encode(self._guard))

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("texts only")
        return self._encode(self._guard + text)[self._num_guard_tokens :]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []
