"""A tokenizer from the keys of a GGUF file. No torch.

The file holds the vocabulary and either merges (byte-level BPE, ``gpt2``) or scores
(SentencePiece BPE, ``llama``). It only names the pre-tokenizer, whose rules are written here.
Called by ``gguf_model``.
"""

from collections.abc import Callable, Iterator

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from engine.config import ModelConfig
from engine.errors import CorruptModel, UnsupportedModel
from engine.loaders.gguf_file import GgufFile
from engine.tokenizer import (
    SubwordTokenizer,
    TokenizerTraits,
    byte_level_bytes,
    sentencepiece_bytes,
)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt_2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    # Digits leave first, one by one: whitespace before a digit is then whitespace at the end of a
    # piece, which GPT-2's pattern keeps together.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt_2()])


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Cut at the matches of each pattern in turn, matches and gaps both being pieces."""
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _default() -> pre_tokenizers.PreTokenizer:
    """What llama.cpp does for files made before pre-tokenizers were named."""
    return _split(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    )


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _default,
    "gpt-2": _gpt_2,
    "llama-bpe": lambda: _split(_LLAMA_3),
    "qwen2": lambda: _split(_QWEN_2),
    "smollm": _smollm,
    "tekken": lambda: _split(_TEKKEN),
}
_OTHER_NAMES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_WHOLE_WORDS = ("llama-bpe", "tekken")
"""A piece that is a token is that token, whatever merges would make of it; and a text begins with
BOS, where the file says nothing."""


def tokenizer_from_gguf(file: GgufFile, config: ModelConfig) -> SubwordTokenizer:
    """Build it.

    Raises:
        UnsupportedModel: a kind of vocabulary or a pre-tokenizer that is not known here.
        CorruptModel: keys are missing or contradict each other.
    """
    kind = file.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{file.path.name}: tokenizer {kind!r:.40} is not supported, only gpt2 (byte-level "
            "BPE) and llama (SentencePiece BPE)"
        )
    vocabulary = _Vocabulary(file)
    if kind == "gpt2":
        pre = file.text("tokenizer.ggml.pre", "default")
        pre = _OTHER_NAMES.get(pre, pre)
        backend, spell = _byte_level(vocabulary, pre), byte_level_bytes
        add_bos, strips = pre in _WHOLE_WORDS, False
    else:
        strips = file.flag("tokenizer.ggml.add_space_prefix", True)
        backend, spell = _sentencepiece(vocabulary, strips), sentencepiece_bytes
        add_bos = True
    added = vocabulary.added()
    backend.add_tokens(
        [
            AddedToken(content, special=special, normalized=False)
            for content, special in added.values()
        ]
    )
    return SubwordTokenizer(
        backend,
        spell,
        literal={token_id: content.encode() for token_id, (content, _) in added.items()},
        special=frozenset(token_id for token_id, (_, special) in added.items() if special),
        traits=_traits(file, config, add_bos, strips),
    )


class _Vocabulary:
    """Tokens and their types, checked against each other."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.tokens = file.texts("tokenizer.ggml.tokens")
        self.types = file.numbers("tokenizer.ggml.token_type").tolist()
        if len(self.types) != len(self.tokens):
            raise self.corrupt(f"{len(self.types)} token types for {len(self.tokens)} tokens")
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            raise self.corrupt("tokenizer.ggml.tokens has the same token twice")

    def corrupt(self, reason: str) -> CorruptModel:
        return CorruptModel(f"{self.file.path.name}: {reason}")

    def of_type(self, *kinds: int) -> Iterator[int]:
        """Ids of the tokens of these types."""
        return (token_id for token_id, kind in enumerate(self.types) if kind in kinds)

    def added(self) -> dict[int, tuple[str, bool]]:
        """id -> (content, special) of the tokens that are matched as a whole."""
        return {
            token_id: (self.tokens[token_id], self.types[token_id] != _USER_DEFINED)
            for token_id in self.of_type(_UNKNOWN, _CONTROL, _USER_DEFINED)
        }


def _byte_level(vocabulary: _Vocabulary, pre: str) -> tokenizers.Tokenizer:
    """BPE over bytes that are written as printable characters."""
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{vocabulary.file.path.name}: pre-tokenizer {pre!r:.40} is not supported, only "
            + ", ".join(sorted(_PRE_TOKENIZERS))
        )
    merges = []
    for merge in vocabulary.file.texts("tokenizer.ggml.merges"):
        left, separator, right = merge.partition(" ")
        if not separator or not {left, right, left + right} <= vocabulary.ids.keys():
            raise vocabulary.corrupt(f"merge {merge!r:.80} is not of tokens in the vocabulary")
        merges.append((left, right))
    ignore_merges = pre in _WHOLE_WORDS
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids, merges, fuse_unk=False, ignore_merges=ignore_merges)
    )
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(vocabulary: _Vocabulary, space_prefix: bool) -> tokenizers.Tokenizer:
    """SentencePiece BPE: of all neighbours whose concatenation is a token, the one of the highest
    score is merged first. Written as merges: every way to cut a token in two tokens, by score.
    """
    unknown = next((vocabulary.tokens[i] for i in vocabulary.of_type(_UNKNOWN)), None)
    if sum(1 for _ in vocabulary.of_type(_BYTE)) != 256:
        raise UnsupportedModel(
            f"{vocabulary.file.path.name}: a SentencePiece vocabulary without the 256 byte tokens"
        )
    scores = vocabulary.file.numbers("tokenizer.ggml.scores").tolist()
    if len(scores) != len(vocabulary.tokens):
        raise vocabulary.corrupt(f"{len(scores)} scores for {len(vocabulary.tokens)} tokens")
    pieces = {vocabulary.tokens[i]: i for i in vocabulary.of_type(_NORMAL)}
    merges = []
    for piece in sorted(pieces, key=lambda piece: -scores[pieces[piece]]):
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [(left, right) for left, right in cuts if left in pieces and right in pieces]
        merges += sorted(pairs, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if space_prefix else replace
    )
    return backend


def _traits(
    file: GgufFile, config: ModelConfig, add_bos: bool, strips_leading_space: bool
) -> TokenizerTraits:
    """``add_bos`` is what llama.cpp does where the file says nothing."""
    eos = config.eos_token_ids[0] if config.eos_token_ids else None
    template = "tokenizer.chat_template"
    return TokenizerTraits(
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        prefix_ids=_wanted(file, "bos", add_bos, config.bos_token_id),
        suffix_ids=_wanted(file, "eos", False, eos),
        chat_template=file.text(template) if template in file.keys else None,
        strips_leading_space=strips_leading_space,
    )


def _wanted(file: GgufFile, name: str, default: bool, token_id: int | None) -> tuple[int, ...]:
    if not file.flag(f"tokenizer.ggml.add_{name}_token", default):
        return ()
    if token_id is None:
        raise CorruptModel(f"{file.path.name}: {name} is to be added, but has no {name}_token_id")
    return (token_id,)
