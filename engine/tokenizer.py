"""Text to token ids and back, over the ``tokenizers`` library. No torch, no files.

A token is a run of bytes: ``token_bytes`` gives them, and ``decode`` is the bytes of all tokens
read as UTF-8, so that decoding token by token (``engine.text``) comes to the same text. Knows
nothing of models and chat; ``engine.loaders`` builds it, the router encodes with it, the decode
service decodes with it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import tokenizers

from engine.errors import InvalidRequest


class Tokenizer(Protocol):
    """What the rest of the engine sees."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""

    @property
    def bos_token_id(self) -> int | None:
        """Begin of text."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    @property
    def chat_template(self) -> str | None:
        """jinja2 source, see ``engine.chat``."""

    @property
    def strips_leading_space(self) -> bool:
        """The first space of a text is an artefact of encoding, and decoding drops it."""

    def encode(
        self, text: str, add_special_tokens: bool = True, *, field: str = "prompt"
    ) -> list[int]:
        """Token ids of ``text``; names of special tokens in it become those tokens.

        Args:
            add_special_tokens: begin with BOS if the model wants it.
            field: what to name in an error.

        Raises:
            InvalidRequest: ``text`` has lone surrogates, so it is no text.
        """

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of the tokens; bytes that are not UTF-8 become U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; empty if there is no such token."""

    def is_special(self, token_id: int) -> bool:
        """A control token, not text."""

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""


def decode_bytes(
    tokenizer: Tokenizer, token_ids: Iterable[int], skip_special_tokens: bool
) -> bytes:
    """The bytes of the tokens, artefacts included."""
    return b"".join(
        tokenizer.token_bytes(token_id)
        for token_id in token_ids
        if not (skip_special_tokens and tokenizer.is_special(token_id))
    )


def _decode(tokenizer: Tokenizer, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
    data = decode_bytes(tokenizer, token_ids, skip_special_tokens)
    if tokenizer.strips_leading_space:
        data = data.removeprefix(b" ")
    return data.decode("utf-8", "replace")


def check_text(text: str, field: str) -> None:
    """Refuse what has no UTF-8.

    Raises:
        InvalidRequest: naming ``field``.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            field, f"character {error.start} is a lone surrogate, not text"
        ) from None


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's vocabulary: printable Latin-1 stands for itself, the other
    bytes for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_level_alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary (GPT-2, Llama 3, Qwen)."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Bytes of a token of a SentencePiece vocabulary with byte fallback (Llama 2, Mistral)."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()


@dataclass(frozen=True, slots=True)
class TokenizerTraits:
    """What a model says about its tokenizer, beside vocabulary and merges."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]
    """Put before every text when special tokens are asked for: BOS, or nothing."""
    suffix_ids: tuple[int, ...]
    """Put after it: nothing, in most models."""
    chat_template: str | None
    strips_leading_space: bool = False


class SubwordTokenizer:
    """A tokenizer of the ``tokenizers`` library.

    Args:
        backend: used for encoding only; its post-processor, padding and truncation are not used.
        spell: bytes of a token, from its spelling in the vocabulary.
        literal: id -> bytes of tokens that are matched as a whole in the text.
        special: of these, the control tokens.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        spell: Callable[[str], bytes],
        literal: Mapping[int, bytes],
        special: frozenset[int],
        traits: TokenizerTraits,
    ) -> None:
        self._backend = backend
        self._spell = spell
        self._literal = literal
        self._special = special
        self._traits = traits
        highest = max((*backend.get_vocab(with_added_tokens=True).values(), -1))
        self._vocab_size = highest + 1

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self._traits.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._traits.eos_token_ids

    @property
    def chat_template(self) -> str | None:
        return self._traits.chat_template

    @property
    def strips_leading_space(self) -> bool:
        return self._traits.strips_leading_space

    def encode(
        self, text: str, add_special_tokens: bool = True, *, field: str = "prompt"
    ) -> list[int]:
        check_text(text, field)
        # Of the library's calls, only those for batches let other threads run meanwhile.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        token_ids: list[int] = encoding.ids
        if not add_special_tokens:
            return token_ids
        return [*self._traits.prefix_ids, *token_ids, *self._traits.suffix_ids]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return _decode(self, token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        literal = self._literal.get(token_id)
        if literal is not None:
            return literal
        token = self.id_to_token(token_id)
        return b"" if token is None else self._spell(token)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def id_to_token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self._vocab_size:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token


class ByteTokenizer:
    """256 bytes, then BOS and EOS: no model's tokenizer, but a whole one, for tests."""

    BOS, EOS = 256, 257
    _NAMES = ("<bos>", "<eos>")

    def __init__(self, add_bos: bool = True, chat_template: str | None = None) -> None:
        self._add_bos = add_bos
        self.chat_template = chat_template
        self.vocab_size = 258
        self.bos_token_id: int | None = self.BOS
        self.eos_token_ids: tuple[int, ...] = (self.EOS,)
        self.strips_leading_space = False
        self._pattern = re.compile("|".join(self._NAMES))

    def encode(
        self, text: str, add_special_tokens: bool = True, *, field: str = "prompt"
    ) -> list[int]:
        check_text(text, field)
        token_ids = [self.BOS] if add_special_tokens and self._add_bos else []
        end = 0
        for match in self._pattern.finditer(text):
            token_ids += text[end : match.start()].encode()
            token_ids.append(256 + self._NAMES.index(match[0]))
            end = match.end()
        return [*token_ids, *text[end:].encode()]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return _decode(self, token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        if self.is_special(token_id):
            return self._NAMES[token_id - 256].encode()
        return bytes([token_id]) if 0 <= token_id < 256 else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in (self.BOS, self.EOS)

    def id_to_token(self, token_id: int) -> str | None:
        if self.is_special(token_id):
            return self._NAMES[token_id - 256]
        return f"<0x{token_id:02X}>" if 0 <= token_id < 256 else None
