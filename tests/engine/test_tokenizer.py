"""Decoding gives the text back, any ids decode, and what is no text is refused."""

import threading
import time
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.loaders.open import open_model
from engine.tokenizer import ByteTokenizer, Tokenizer

texts = st.text(st.one_of(st.sampled_from(list("aé中😀 \n\t01'.,")), st.characters(codec="utf-8")))


@cache
def demo() -> Tokenizer:
    return open_model("demo").tokenizer()


@given(texts)
def test_decoding_gives_the_text_back(text: str) -> None:
    # Six control characters and planes 4 to 11 have no token in the demo's vocabulary.
    if not any(c in "\x04\x06\x13\x14\x16\x1d" or 0x40000 <= ord(c) < 0xC0000 for c in text):
        ids = demo().encode(text)
        assert demo().decode(ids, skip_special_tokens=False) == text
    ids = ByteTokenizer().encode(text, add_special_tokens=False)
    assert ByteTokenizer().decode(ids, skip_special_tokens=False) == text


@given(st.lists(st.integers(-5, 60000), max_size=20), st.booleans())
def test_decode_takes_any_ids(ids: list[int], skip: bool) -> None:
    text = demo().decode(ids, skip)
    known = [i for i in ids if 0 <= i < demo().vocab_size]
    assert text == demo().decode(known, skip)


def test_encoding_a_long_text_stops_no_other_thread() -> None:
    demo()
    thread = threading.Thread(target=demo().encode, args=("a b" * 200_000,))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        time.sleep(0.002)
        num_turns += 1
    assert num_turns > 10


def test_what_the_demo_says_about_itself() -> None:
    tokenizer = demo()
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert [i for i in range(100) if tokenizer.is_special(i)] == list(range(17))
    assert tokenizer.id_to_token(2) == "<|im_end|>"
    assert tokenizer.id_to_token(49152) is None and tokenizer.id_to_token(-1) is None
    assert tokenizer.token_bytes(256) == b"  " and tokenizer.token_bytes(10**20) == b""
    assert tokenizer.chat_template is not None and "<|im_start|>" in tokenizer.chat_template
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d\ude00"])
def test_surrogates_are_refused(text: str) -> None:
    for tokenizer in (demo(), ByteTokenizer()):
        with pytest.raises(InvalidRequest, match=r"prompt: .*surrogate"):
            tokenizer.encode(text)
        with pytest.raises(InvalidRequest, match=r"messages: .*surrogate"):
            tokenizer.encode(text, field="messages")


def test_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é<eos>") == [256, 0xC3, 0xA9, 257]
    assert ByteTokenizer(add_bos=False).encode("a") == [97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    assert tokenizer.decode([256, 97, 257, 300, -1]) == "a"
    assert tokenizer.decode([256, 97], skip_special_tokens=False) == "<bos>a"
    assert tokenizer.id_to_token(97) == "<0x61>" and tokenizer.id_to_token(257) == "<eos>"
    assert tokenizer.id_to_token(258) is None
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (258, (257,))
