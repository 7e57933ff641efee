"""Guided answers are always in the language asked for, whoever reads them and from where."""

import json
import random
import re
from functools import cache

import jsonschema
import numpy as np
import pytest

from engine.errors import GuideLimit, InvalidRequest
from engine.guide import Guides
from engine.loaders.open import open_model
from engine.request import Guide, GuideKind
from engine.tokenizer import ByteTokenizer, Tokenizer
from tests.engine.loaders.test_gguf_tokenizer import sentencepiece

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", "🙂"]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "more"],
    "additionalProperties": False,
}
PERSON = Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA))


@cache
def byte_guides() -> tuple[Guides, Tokenizer, int]:
    tokenizer = ByteTokenizer()
    return Guides(tokenizer, tokenizer.vocab_size), tokenizer, tokenizer.vocab_size


@cache
def demo_guides() -> tuple[Guides, Tokenizer, int]:
    files = open_model("demo")
    tokenizer = files.tokenizer()
    return Guides(tokenizer, files.config.vocab_size), tokenizer, files.config.vocab_size


def allowed(
    guides: Guides, vocab_size: int, name: str, guide: Guide, output: list[int]
) -> set[int]:
    words = guides.mask(name, guide, output)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
    return set(np.flatnonzero(bits).tolist())


def walk(which: tuple[Guides, Tokenizer, int], guide: Guide, seed: int) -> tuple[str, list[int]]:
    """An answer drawn from whatever is allowed, and its tokens."""
    guides, tokenizer, vocab_size = which
    chance, output = random.Random(seed), []
    while len(output) < 2000:
        some = allowed(guides, vocab_size, f"walk-{guide}-{seed}", guide, output)
        token_id = chance.choice(sorted(some))
        if token_id in tokenizer.eos_token_ids:
            return tokenizer.decode(output), output
        output.append(token_id)
    raise AssertionError("no end")


@pytest.mark.parametrize("seed", range(200))
def test_a_schema_is_kept(seed: int) -> None:
    text, _ = walk(byte_guides() if seed % 2 else demo_guides(), PERSON, seed)
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("space_prefix", [True, False])
def test_a_schema_is_kept_by_sentencepiece(space_prefix: bool) -> None:
    """Its tokenizers put a space before a text; the inside of an answer has none."""
    tokenizer = sentencepiece(space_prefix)
    vocab_size = tokenizer.vocab_size + 7  # as models pad it
    guides = Guides(tokenizer, vocab_size)
    for seed in range(30):
        text, _ = walk((guides, tokenizer, vocab_size), PERSON, seed)
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("seed", range(10))
def test_other_languages_are_kept(seed: int) -> None:
    text, _ = walk(demo_guides(), Guide(GuideKind.REGEX, r"[a-c]{3,5}-[0-9]+x"), seed)
    assert re.fullmatch(r"[a-c]{3,5}-[0-9]+x", text)
    choices = ("yes", 'no "really"', "línea\n2", "yesterday")
    assert walk(demo_guides(), Guide(GuideKind.CHOICE, choices=choices), seed)[0] in choices
    lark = 'start: "a" (b | "c")\nb: "b" b?'
    assert re.fullmatch("a(b+|c)", walk(demo_guides(), Guide(GuideKind.GRAMMAR, lark), seed)[0])
    text, _ = walk(byte_guides(), Guide(GuideKind.JSON_OBJECT), seed)
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("seed", range(5))
def test_a_place_follows_from_the_output_alone(seed: int) -> None:
    """Kept, rebuilt elsewhere, and after steps that were thrown away: the same tokens."""
    guides, tokenizer, vocab_size = demo_guides()
    _, output = walk((guides, tokenizer, vocab_size), PERSON, seed)
    for cut in range(0, len(output), 3):
        kept = allowed(guides, vocab_size, f"kept-{seed}", PERSON, output[:cut])
        fresh = allowed(guides, vocab_size, f"fresh-{seed}-{cut}", PERSON, output[:cut])
        again = allowed(guides, vocab_size, f"kept-{seed}", PERSON, output[:cut])
        assert kept == fresh == again and output[cut] in kept
    back = allowed(guides, vocab_size, f"kept-{seed}", PERSON, output[:1])
    assert back == allowed(guides, vocab_size, f"another-{seed}", PERSON, output[:1])


def test_what_left_the_language_is_told() -> None:
    guides, tokenizer, vocab_size = byte_guides()
    guide = Guide(GuideKind.CHOICE, choices=("yes", "no"))
    with pytest.raises(GuideLimit, match="satisfy the grammar") as caught:
        allowed(guides, vocab_size, "lost", guide, list(b"maybe"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    over = allowed(guides, vocab_size, "over", guide, list(b"yes"))
    assert over == set(tokenizer.eos_token_ids)


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        (Guide(GuideKind.REGEX, "(("), "unclosed group"),
        (Guide(GuideKind.GRAMMAR, "nonsense"), "Expected"),
        (Guide(GuideKind.JSON_SCHEMA, "{"), "not valid JSON"),
        (Guide(GuideKind.JSON_SCHEMA, "[" * 100_000), "not valid JSON"),
        (Guide(GuideKind.JSON_SCHEMA, "[1]"), "not a JSON object"),
        (Guide(GuideKind.JSON_SCHEMA, '{"type": "wizard"}'), "wizard"),
        (Guide(GuideKind.JSON_SCHEMA, '{"$ref": "#"}'), "^: it allows nothing to come next$"),
        (
            Guide(
                GuideKind.JSON_SCHEMA,
                '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
            ),
            "^: it allows nothing to come next$",
        ),
    ],
)
def test_what_is_no_guide_is_refused_in_one_line(guide: Guide, reason: str) -> None:
    guides, _, _ = byte_guides()
    with pytest.raises(InvalidRequest, match=reason) as caught:
        guides.check(guide)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
