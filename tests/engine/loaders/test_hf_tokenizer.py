"""tokenizer.json and what stands beside it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from engine.errors import CorruptModel, ModelNotFound, UnsupportedModel
from engine.loaders.open import open_model
from tests.tiny_model import CHAT_TEMPLATE, SPECIAL, make_tiny_model

BOS, EOS = 256, 257


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", num_layers=1)


def edit(directory: Path, **changes: Any) -> None:
    """Change keys of tokenizer_config.json, or drop them with None."""
    path = directory / "tokenizer_config.json"
    options = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in options.items() if v is not None}))


def add_template(directory: Path, *, bos: bool, eos: bool) -> None:
    """A post-processor, as most Llama tokenizers have."""
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    single = f"{SPECIAL[0] + ' ' if bos else ''}$A{' ' + SPECIAL[1] if eos else ''}"
    specials = [(SPECIAL[0], BOS), (SPECIAL[1], EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
    tokenizer.save(path)


def encode(directory: Path, text: str = "a") -> list[int]:
    return open_model(str(directory)).tokenizer().encode(text)


def test_what_it_says_about_itself(tiny: Path) -> None:
    tokenizer = open_model(str(tiny)).tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (260, BOS)
    assert tokenizer.eos_token_ids == (EOS,)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert [i for i in range(260) if tokenizer.is_special(i)] == [256, 257, 258, 259]
    text = "héllo <|user|> 中😀"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert not tokenizer.strips_leading_space


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_post_processor_says_how_a_text_begins(tiny: Path, bos: bool, eos: bool) -> None:
    [a] = encode(tiny)
    add_template(tiny, bos=bos, eos=eos)
    edit(tiny, add_bos_token=None)
    assert encode(tiny) == [BOS] * bos + [a] + [EOS] * eos
    tokenizer = open_model(str(tiny)).tokenizer()
    assert tokenizer.encode("a", add_special_tokens=False) == [a]
    assert tokenizer.encode("") == [BOS] * bos + [EOS] * eos


def test_options_win_over_the_post_processor(tiny: Path) -> None:
    [a] = encode(tiny)
    edit(tiny, add_bos_token=True, bos_token={"content": SPECIAL[0], "lstrip": False})
    assert encode(tiny) == [BOS, a]
    add_template(tiny, bos=True, eos=True)
    assert encode(tiny) == [BOS, a, EOS]
    edit(tiny, add_bos_token=False, add_eos_token=False)
    assert encode(tiny) == [a]


def test_truncation_and_padding_are_off(tiny: Path) -> None:
    path = str(tiny / "tokenizer.json")
    backend = Tokenizer.from_file(path)
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(path)
    assert len(encode(tiny, "abcdefgh")) == 8


def test_chat_template_places(tiny: Path) -> None:
    def template() -> str | None:
        return open_model(str(tiny)).tokenizer().chat_template

    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit(tiny, chat_template=named)
    assert template() == "D"
    edit(tiny, chat_template=named[:1])
    assert template() is None
    edit(tiny, chat_template=7)
    with pytest.raises(CorruptModel, match="chat_template is not a string"):
        template()
    (tiny / "chat_template.jinja").write_text("F é\n", "utf-8")
    assert template() == "F é\n"
    (tiny / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CorruptModel, match="not UTF-8"):
        template()


def test_no_options_file(tiny: Path) -> None:
    (tiny / "tokenizer_config.json").unlink()
    tokenizer = open_model(str(tiny)).tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS, (EOS,))
    assert tokenizer.chat_template is None


def test_what_is_refused(tiny: Path) -> None:
    def refuse(error: type[Exception], reason: str) -> None:
        with pytest.raises(error, match=reason) as caught:
            open_model(str(tiny)).tokenizer()
        assert "\n" not in str(caught.value)

    edit(tiny, bos_token=7)
    refuse(CorruptModel, "bos_token is not a token")
    edit(tiny, bos_token="absent", add_bos_token=True)
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(config | {"bos_token_id": None}))
    refuse(CorruptModel, "add_bos_token is set, but")
    edit(tiny, bos_token=None, add_bos_token=None)
    backend = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    backend.add_tokens(["more", "than", "embeddings"])
    backend.save(str(tiny / "tokenizer.json"))
    refuse(CorruptModel, "the tokenizer has 263 tokens, config.json allows 260")
    backend.decoder = decoders.WordPiece()
    backend.save(str(tiny / "tokenizer.json"))
    refuse(UnsupportedModel, "decoder 'WordPiece'")
    (tiny / "tokenizer.json").unlink()
    refuse(ModelNotFound, "has no tokenizer.json")


@pytest.mark.parametrize("strip", [True, False])
def test_sentencepiece_style(tiny: Path, strip: bool) -> None:
    """As Llama 2's tokenizer.json is written."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(200))]
    tokens += ["\u2581", "h", "i", "hi", "\u2581hi"]
    # Bytes up to 0xC7, since the tiny model has 260 embeddings.
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [("h", "i"), ("\u2581", "hi")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    replace = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *[decoders.Strip(" ", 1, 0)] * strip])
    backend.add_special_tokens(["<s>"])
    backend.save(str(tiny / "tokenizer.json"))
    edit(tiny, bos_token="<s>", add_bos_token=True)
    tokenizer = open_model(str(tiny)).tokenizer()
    ids = tokenizer.encode("hi  hi\u00c5<s>hi")
    assert ids[0] == vocab["\u2581hi"] + 1
    assert tokenizer.strips_leading_space == strip
    for sample in (ids, ids[1:], ids[2:], [1 + 0x41, 1 + 0xC3, 1 + 0xA9]):
        for skip in (True, False):
            assert tokenizer.decode(sample, skip) == backend.decode(
                sample, skip_special_tokens=skip
            )
