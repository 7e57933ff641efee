"""Token ids of GGUF vocabularies, against rules spelt out plainly and a tokenizer.json by hand.

The demo's vocabulary serves for all pre-tokenizers: only where a text is cut differs.
"""

import json
import unicodedata
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ModelConfig
from engine.errors import CorruptModel, UnsupportedModel
from engine.loaders.gguf_file import GgufFile, GgufKey
from engine.loaders.gguf_tokenizer import tokenizer_from_gguf
from engine.loaders.open import open_model
from engine.tokenizer import Tokenizer
from tests.engine.loaders.llama_files import TOKENS, random_weights, write_gguf

CORPUS = [
    "",
    "The quick brown fox jumps over the lazy dog.",
    "Hello  123 and   4567, 89\n\n 10",
    "x = [i**2 for i in range(10) if i % 3 == 0]  # squares\n\tprint(x)\n",
    "def f(a,b):\n    return a+b\n\n\n    ",
    "你好，世界！人人生而自由。 ２０２４年",
    "😀🎉 naïve café Straße ΑΒΓ абв 한국어 ภาษาไทย हिन्दी",
    "don't WE'LL they've I'M it'S 'tis",
    "   leading, trailing   ",
    "a\r\nb\rc\t\td\u00a0e\u2003f",
    "camelCase HTTPServer myXMLParser //\n/// ÀÉÎàéî ǅ",
    "1 22 333 4444 ½ Ⅷ ٣ x1y2",
    "$100 <= 50% ^~| {[()]} == != ... ---",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "a<|im_start|><|im_end|>b <|im_start |> <file_sep>1",
    "https://example.com/a?b=c&d=1#e  v1.2.3-rc4",
    "\x00\x01\x7f\u200b\ufeff\ufffd",
]
PRE_TOKENIZERS = ("default", "gpt-2", "llama-bpe", "qwen2", "smollm", "tekken")

# As in the sources of GPT-2, Llama 3 and llama.cpp, with whitespace spelt out: libraries differ
# on four control characters.
S, NOT_S = r"\p{White_Space}", r"\P{White_Space}"
GPT_2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+"
    rf"| ?[^{S}\p{{L}}\p{{N}}]+|{S}+(?!{NOT_S})|{S}+"
)
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    rf"| ?[^{S}\p{{L}}\p{{N}}]+[\r\n]*|{S}*[\r\n]+|{S}+(?!{NOT_S})|{S}+"
)
# Words are cut where a capital follows a small letter.
TEKKEN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        rf"\p{{N}}| ?[^{S}\p{{L}}\p{{N}}]+[\r\n/]*|{S}*[\r\n]+|{S}+(?!{NOT_S})|{S}+",
    ]
)
CUTS = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "gpt-2": [GPT_2],
    "llama-bpe": [LLAMA_3],
    "qwen2": [LLAMA_3.replace("{1,3}", "{1}")],
    "smollm": [r"\p{N}", GPT_2],
    "tekken": [TEKKEN],
}


@cache
def demo() -> Tokenizer:
    return open_model("demo").tokenizer()


@cache
def demo_file() -> tuple[GgufFile, ModelConfig]:
    model = open_model("demo")
    return GgufFile(model.path), model.config  # type: ignore[attr-defined]


@cache
def with_pre_tokenizer(name: str) -> Tokenizer:
    """The demo's vocabulary cut in another way."""
    path, config = demo_file()[0].path, demo_file()[1]
    file = GgufFile(path)
    file.keys["tokenizer.ggml.pre"] = GgufKey(name, 0, 0)
    file.keys["tokenizer.ggml.add_bos_token"] = GgufKey(False, 0, 0)
    return tokenizer_from_gguf(file, config)


class PlainBpe:
    """Byte-pair encoding as first described: while any neighbours are a merge, do the best."""

    def __init__(self, file: GgufFile, cuts: list[str], ignore_merges: bool) -> None:
        self.ids = {token: i for i, token in enumerate(file.texts("tokenizer.ggml.tokens"))}
        merges = file.texts("tokenizer.ggml.merges")
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.cuts = [regex.compile(cut) for cut in cuts]
        self.ignore_merges = ignore_merges
        special = list(self.ids)[:17]
        self.special = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")
        # GPT-2's table: printable bytes are themselves, the others are counted up from 256.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self.spelling = {byte: chr(byte) for byte in printable}
        self.spelling |= {byte: chr(256 + i) for i, byte in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self.special.split(text):
            if self.special.fullmatch(part):
                ids.append(self.ids[part])
                continue
            pieces = [part]
            for cut in self.cuts:
                pieces = [p for piece in pieces for p in self.cut(cut, piece)]
            for piece in pieces:
                ids += self.merge([self.spelling[byte] for byte in piece.encode()])
        return ids

    @staticmethod
    def cut(pattern: "regex.Pattern[str]", text: str) -> list[str]:
        pieces, end = [], 0
        for match in pattern.finditer(text):
            pieces += [text[end : match.start()], match[0]]
            end = match.end()
        return [piece for piece in [*pieces, text[end:]] if piece]

    def merge(self, symbols: list[str]) -> list[int]:
        if self.ignore_merges and "".join(symbols) in self.ids:
            return [self.ids["".join(symbols)]]
        # The vocabulary lacks a few bytes; what has no token is left out before merging.
        symbols = [symbol for symbol in symbols if symbol in self.ids]
        while True:
            ranks = [self.ranks.get(pair) for pair in pairwise(symbols)]
            known = [(rank, at) for at, rank in enumerate(ranks) if rank is not None]
            best = min(known, default=None)
            if best is None:
                return [self.ids[symbol] for symbol in symbols]
            at = best[1]
            symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]


@cache
def plain(name: str) -> PlainBpe:
    return PlainBpe(demo_file()[0], CUTS[name], ignore_merges=name in ("llama-bpe", "tekken"))


# Characters that both Unicode tables know, where cuts happen more often than anywhere.
interesting = st.sampled_from(list("aZéß中한 \n\r\t\u00a0'sStTlL01９½.,!?$<>=_-"))
texts = st.text(
    st.one_of(interesting, st.characters(exclude_categories=["Cs", "Cn", "Co"])), max_size=30
)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@given(texts)
def test_ids_equal_plain_bpe(name: str, text: str) -> None:
    if name == "qwen2":
        text = unicodedata.normalize("NFC", text)
    assert with_pre_tokenizer(name).encode(text) == plain(name).encode(text)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@pytest.mark.parametrize("text", CORPUS)
def test_corpus_equals_plain_bpe(name: str, text: str) -> None:
    assert with_pre_tokenizer(name).encode(text) == plain(name).encode(text)


def write_reference(path: Path, **changes: object) -> Path:
    """tokenizer.json as the authors of the demo model describe theirs."""
    file, _ = demo_file()
    tokens = file.texts("tokenizer.ggml.tokens")
    added = [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id in range(17)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    digits = {"type": "Digits", "individual_digits": True}
    description = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [digits, {**byte_level, "use_regex": True}],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": file.texts("tokenizer.ggml.merges"),
        },
        **changes,
    }
    path.write_text(json.dumps(description))
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    path = write_reference(tmp_path_factory.mktemp("reference") / "tokenizer.json")
    return tokenizers.Tokenizer.from_file(str(path))


def test_demo_equals_the_reference(reference: tokenizers.Tokenizer) -> None:
    for text in [*CORPUS, "\n".join(CORPUS)]:
        ids = reference.encode(text).ids
        assert demo().encode(text) == ids
        for skip in (True, False):
            assert demo().decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_digits_leave_one_by_one() -> None:
    ids = demo().encode("Hello  123")
    assert [demo().id_to_token(i) for i in ids] == ["Hello", "ĠĠ", "1", "2", "3"]
    assert ids == [19556, 256, 33, 34, 35]
    assert demo().encode("Hello world 2024 <|im_start|>")[-1] == 1


def test_bos_where_the_file_asks_for_it(tmp_path: Path) -> None:
    def ids(**keys: object) -> list[int]:
        path = write_gguf(
            tmp_path / "a.gguf",
            random_weights(),
            keys={f"tokenizer.ggml.{name}": value for name, value in keys.items()},
        )
        return open_model(str(path)).tokenizer().encode("abc")

    abc = [259]
    assert ids(add_bos_token=True) == [256, *abc]
    assert ids(add_bos_token=False) == abc
    assert ids(add_bos_token=None) == abc
    assert ids(add_bos_token=None, pre="llama-bpe") == [256, *abc]
    assert ids(add_eos_token=True) == [256, *abc, 257]
    with pytest.raises(CorruptModel, match="no bos_token_id"):
        ids(bos_token_id=None)


@pytest.mark.parametrize(
    ("keys", "error", "reason"),
    [
        ({"model": "bert"}, UnsupportedModel, "tokenizer 'bert'"),
        ({"pre": "falcon"}, UnsupportedModel, "pre-tokenizer 'falcon'"),
        ({"merges": ["a b", "b z"]}, CorruptModel, "merge 'b z'"),
        ({"merges": ["ab"]}, CorruptModel, "merge 'ab'"),
        ({"merges": None}, CorruptModel, "merges is missing"),
        ({"token_type": [1, 1]}, CorruptModel, "2 token types for 261"),
        ({"tokens": ["a"] * 261}, CorruptModel, "twice"),
        ({"model": "llama"}, UnsupportedModel, "256 byte tokens"),
    ],
)
def test_what_vocabularies_are_refused(
    tmp_path: Path, keys: dict[str, object], error: type[Exception], reason: str
) -> None:
    keys = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    model = open_model(str(write_gguf(tmp_path / "a.gguf", random_weights(), keys=keys)))
    with pytest.raises(error, match=reason) as caught:
        model.tokenizer()
    assert "a.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_llama_3_prefers_whole_tokens_to_merges(tmp_path: Path) -> None:
    def ids(pre: str) -> list[int]:
        keys = {
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.tokens": [*TOKENS[:-1], "xyz"],
            "tokenizer.ggml.merges": ["a b", "ab c"],
        }
        path = write_gguf(tmp_path / f"{pre}.gguf", random_weights(), keys=keys)
        return open_model(str(path)).tokenizer().encode("xyz")

    assert ids("llama-bpe") == [len(TOKENS) - 1]
    assert ids("gpt-2") == [TOKENS.index(letter) for letter in "xyz"]


# SentencePiece: words of a tiny corpus, pieces in the order in which training would find them.
PIECES = [
    *("▁t", "he", "▁a", "in", "▁the", "er", "on", "▁▁", "aa", "aaa", "▁▁▁▁", "▁in", "ther"),
    *("▁other", "▁an", "an", "and", "▁and", "ba", "aba", "中文"),
    *"▁abcdehinorst中文é",
]
SENTENCEPIECE_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]


@cache
def sentencepiece(space_prefix: bool) -> Tokenizer:
    """A vocabulary of type ``llama`` in the demo's file."""
    file, config = GgufFile(demo_file()[0].path), demo_file()[1]
    count = len(SENTENCEPIECE_TOKENS)
    types = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    keys = {
        "model": "llama",
        "tokens": SENTENCEPIECE_TOKENS,
        "token_type": np.array(types),
        "scores": np.array([0.0] * 259 + [-float(i) for i in range(len(PIECES))]),
        "add_space_prefix": space_prefix,
    }
    del file.keys["tokenizer.ggml.add_bos_token"]
    for name, value in keys.items():
        file.keys[f"tokenizer.ggml.{name}"] = GgufKey(value, 0, 0)
    return tokenizer_from_gguf(file, replace(config, vocab_size=count))


def plain_sentencepiece(text: str, space_prefix: bool) -> list[int]:
    """While any neighbours make a piece, make the one of the best score, leftmost first."""
    ids = {piece: i for i, piece in enumerate(SENTENCEPIECE_TOKENS)}
    scores = {piece: -i for i, piece in enumerate(PIECES)}
    symbols = list((" " + text if space_prefix and text else text).replace(" ", "▁"))
    while True:
        joined = [symbols[at] + symbols[at + 1] for at in range(len(symbols) - 1)]
        found = [(-scores[piece], at) for at, piece in enumerate(joined) if piece in scores]
        if not found:
            break
        at = min(found)[1]
        symbols = [*symbols[:at], joined[at], *symbols[at + 2 :]]
    output: list[int] = []
    for symbol in symbols:
        output += [ids[symbol]] if symbol in scores else [3 + byte for byte in symbol.encode()]
    return output


@given(st.text(st.sampled_from(list("  abcdehinorst中文é😀\n▁")), max_size=40), st.booleans())
def test_sentencepiece_equals_its_rule(text: str, space_prefix: bool) -> None:
    tokenizer = sentencepiece(space_prefix)
    expected = plain_sentencepiece(text, space_prefix)
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert tokenizer.encode(text) == [1, *expected]
    assert tokenizer.decode(expected) == text.replace("▁", " ")


def test_sentencepiece_special_tokens() -> None:
    tokenizer = sentencepiece(True)
    the = SENTENCEPIECE_TOKENS.index("▁the")
    assert tokenizer.encode("the</s>the", add_special_tokens=False) == [the, 2, the]
    assert tokenizer.strips_leading_space and tokenizer.decode([1, the, 2, the]) == "the the"
    assert not sentencepiece(False).strips_leading_space
