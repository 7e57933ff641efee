"""Streaming text equals decoding at the end, however the stream is cut; stop strings likewise."""

import random
import time
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.loaders.open import open_model
from engine.text import Detokenizer, StopChecker
from engine.tokenizer import ByteTokenizer, Tokenizer

BYTES = ByteTokenizer()


class SpacedTokenizer(ByteTokenizer):
    """Decodes as SentencePiece does: the first space of a text is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.strips_leading_space = True


@cache
def demo() -> Tokenizer:
    return open_model("demo").tokenizer()


def expected(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """What output added to the text, from decoding everything at once."""
    before = tokenizer.decode(prompt, skip)
    whole = tokenizer.decode(prompt + output, skip)
    if whole.startswith(before):
        return whole[len(before) :]
    # The output completed a character of the prompt, which was U+FFFD alone.
    assert before.endswith("\ufffd")
    return whole[len(before) - 1 :]


def stream(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool, sizes: list[int]
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    pieces, start = [], 0
    for size in [*sizes, len(output)]:
        pieces.append(detokenizer.push(output[start : start + size]))
        start += size
    return [*pieces, detokenizer.flush()]


# Half of the bytes come from a few characters of 2, 3 and 4 bytes, so that they often meet.
awkward = st.sampled_from(list("é中😀 ".encode()))
byte_ids = st.lists(st.one_of(awkward, st.integers(0, 257)), max_size=24)
sizes = st.lists(st.integers(0, 4), max_size=12)


@given(byte_ids, byte_ids, st.booleans(), sizes)
def test_stream_equals_decode(
    prompt: list[int], output: list[int], skip: bool, sizes: list[int]
) -> None:
    for tokenizer in (BYTES, SpacedTokenizer()):
        pieces = stream(tokenizer, prompt, output, skip, sizes)
        assert "".join(pieces) == expected(tokenizer, prompt, output, skip)


@given(st.text(), st.text(), sizes)
def test_no_piece_holds_a_part_of_a_character(prompt: str, text: str, sizes: list[int]) -> None:
    clean = text.replace("\ufffd", "")
    output = BYTES.encode(clean, add_special_tokens=False)
    pieces = stream(BYTES, BYTES.encode(prompt), output, False, sizes)
    assert "".join(pieces) == clean
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 49151), max_size=12), st.lists(st.integers(0, 49151), max_size=24))
def test_stream_equals_decode_with_a_real_vocabulary(prompt: list[int], output: list[int]) -> None:
    pieces = stream(demo(), prompt, output, True, [1] * len(output))
    assert "".join(pieces) == expected(demo(), prompt, output, True)


def test_emoji_comes_whole_when_its_last_byte_does() -> None:
    detokenizer = Detokenizer(BYTES, [])
    assert [detokenizer.push([byte]) for byte in "😀".encode()] == ["", "", "", "😀"]


def test_cut_emoji_ends_as_replacement() -> None:
    detokenizer = Detokenizer(BYTES, [])
    assert detokenizer.push("😀".encode()[:3]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_output_completes_a_character_of_the_prompt() -> None:
    prompt = list("a😀".encode())[:-1]
    detokenizer = Detokenizer(BYTES, prompt)
    assert detokenizer.push(["😀".encode()[-1], ord("b")]) == "😀b"


def test_incomplete_character_of_the_prompt_is_not_the_outputs() -> None:
    prompt = list("a😀".encode())[:-1]
    detokenizer = Detokenizer(BYTES, prompt)
    assert detokenizer.push([ord("b")]) == "b"
    assert Detokenizer(BYTES, prompt).flush() == ""


def test_leading_space_is_dropped_only_where_the_text_begins() -> None:
    space = [ord(" "), ord("a")]
    assert Detokenizer(SpacedTokenizer(), [ByteTokenizer.BOS]).push(space) == "a"
    assert Detokenizer(SpacedTokenizer(), [ord("x")]).push(space) == " a"
    assert Detokenizer(BYTES, []).push(space) == " a"


def test_special_tokens_are_text_when_asked_for() -> None:
    output = [ord("a"), ByteTokenizer.EOS, ord("b")]
    assert Detokenizer(BYTES, [], skip_special_tokens=True).push(output) == "ab"
    assert Detokenizer(BYTES, [], skip_special_tokens=False).push(output) == "a<eos>b"


def stopped_at(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The rule, word by word: the first to be complete, of these the longest."""
    for end in range(1, len(text) + 1):
        complete = [word for word in stop if text[:end].endswith(word)]
        if complete:
            found = max(complete, key=len)
            return text[: end - len(found)], found
    return text, None


def check(pieces: list[str], stop: tuple[str, ...]) -> tuple[str, str | None]:
    checker, sent, matched = StopChecker(stop), "", None
    for piece in pieces:
        text, found = checker.push(piece)
        sent += text
        assert matched is None or (text, found) == ("", matched)
        matched = found
    return sent + checker.flush(), matched


@st.composite
def stops_and_text(draw: st.DrawFn) -> tuple[tuple[str, ...], str]:
    """Stop strings of few letters, and a text that is made of their beginnings."""
    words = st.lists(st.text(alphabet="abß", min_size=1, max_size=6), max_size=5)
    stop = tuple(draw(words))
    beginnings = [word[:length] for word in stop for length in range(1, len(word))]
    pieces = st.lists(st.sampled_from([*beginnings, "a", "ß"]), max_size=6)
    return stop, "".join(draw(pieces))


@given(stops_and_text(), sizes)
def test_stop_checker_equals_the_rule(
    stop_and_text: tuple[tuple[str, ...], str], sizes: list[int]
) -> None:
    stop, text = stop_and_text
    pieces, start = [], 0
    for size in [*sizes, len(text)]:
        pieces.append(text[start : start + size])
        start += size
    assert check(pieces, stop) == stopped_at(text, stop)


@given(stops_and_text())
def test_only_what_may_begin_a_stop_string_is_held(
    stop_and_text: tuple[tuple[str, ...], str],
) -> None:
    stop, text = stop_and_text
    sent, matched = StopChecker(stop).push(text)
    if matched is None:
        beginnings = {word[:length] for word in stop for length in range(1, len(word))}
        longest = max((len(b) for b in beginnings if text.endswith(b)), default=0)
        assert sent == text[: len(text) - longest]


def test_first_to_be_complete_wins() -> None:
    assert check(["xabcd"], ("abcd", "bc")) == ("xa", "bc")
    assert check(["xabcd"], ("cd", "abcd", "d")) == ("x", "abcd")


def test_a_long_beginning_is_held_until_it_is_none() -> None:
    checker = StopChecker(("</answer>",))
    assert checker.push("4</answ") == ("4", None)
    assert checker.push("erx") == ("</answerx", None)
    assert checker.push("</answer") == ("", None)
    assert checker.push(">y") == ("", "</answer>")
    assert checker.push("z") == ("", "</answer>") and checker.flush() == ""


def test_no_stop_strings_hold_nothing() -> None:
    assert StopChecker(()).push("anything") == ("anything", None)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^stop: "):
        StopChecker(("a", ""))


def test_ten_thousand_stop_strings_cost_no_more_than_one() -> None:
    """A naive search would look at 10,000 strings for each of 200,000 characters."""
    draw = random.Random(0)
    stop = tuple("".join(draw.choices("abcdefgh", k=12)) for _ in range(10_000))
    text = "".join(draw.choices("abcdefgh ", k=100_000))
    started = time.process_time()
    checker = StopChecker(stop)
    sent = [checker.push(text[start : start + 4])[0] for start in range(0, len(text), 4)]
    assert "".join(sent) + checker.flush() == text
    assert time.process_time() - started < 10
