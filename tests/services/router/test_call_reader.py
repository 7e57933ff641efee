"""Tool calls in answers of every spelling, wherever the text is cut."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.call_reader import Arguments, CallBegins, CallReader, CallSpelling, Part, Text

HERMES = CallSpelling("<tool_call>", "</tool_call>")
MISTRAL = CallSpelling("[TOOL_CALLS]")
NAMED = CallSpelling("[TOOL_CALLS]", args="[ARGS]", call_id="[CALL_ID]")
LLAMA = CallSpelling(ignored="<|python_tag|>")
PLAIN = CallSpelling()
NAMES = ("f", "g")
Answer = tuple[str, list[tuple[str, str]]]


def gather(parts: Sequence[Part]) -> Answer:
    """The text, and each call's name and arguments."""
    text, calls = "", list[tuple[str, str]]()
    for part in parts:
        match part:
            case Text(more):
                text += more
            case CallBegins(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case Arguments(index, more):
                assert index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return text, calls


def read(spelling: CallSpelling, pieces: Sequence[str], most_calls: int | None = None) -> Answer:
    reader = CallReader(spelling, NAMES, most_calls)
    parts = [part for piece in pieces for part in reader.push(piece)]
    answer = gather(parts + reader.end())
    assert reader.num_calls == len(answer[1])
    return answer


CALLS: list[tuple[CallSpelling, str, str, list[tuple[str, str]]]] = [
    (
        HERMES,
        'So: \n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"", "b": [1, {}]}}\n</tool_call>'
        '\n<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>\n',
        "So:",
        [("f", '{"a": "x}\\"", "b": [1, {}]}'), ("g", "{}")],
    ),
    (HERMES, '<tool_call>{"name": "h"}</tool_call> bye', " bye", [("h", "{}")]),
    (
        HERMES,
        '<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    (
        MISTRAL,
        'Well. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "Well.",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        NAMED,
        'Well. [TOOL_CALLS]f[ARGS]{"a": [1, "}"]}[TOOL_CALLS]g[CALL_ID]a1B[ARGS] {}',
        "Well.",
        [("f", '{"a": [1, "}"]}'), ("g", "{}")],
    ),
    (NAMED, '[TOOL_CALLS]h[ARGS]{"cut', "", [("h", '{"cut')]),
    (NAMED, "[TOOL_CALLS]h[ARGS]{} and so on", " and so on", [("h", "{}")]),
    (
        LLAMA,
        ' <|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (LLAMA, '{"type": "function", "name": "f", "parameters": null}', "", [("f", "{}")]),
    (PLAIN, '[{"name": "f", "arguments": "{\\"a\\": 2}"}]', "", [("f", '{"a": 2}')]),
    (PLAIN, '{"name": "f", "n": 12, "arguments": {"é": "🙂"}}', "", [("f", '{"é": "🙂"}')]),
    (PLAIN, '{"name": "f", "arguments": {}} and so on', " and so on", [("f", "{}")]),
    (PLAIN, '{"name": "f", "arguments": {"cut', "", [("f", '{"cut')]),
]
TEXTS = [
    *(
        (HERMES, text)
        for text in ("", " ", "a < b", "x </tool_call> <tool_", "<tool_call>", "\n\n")
    ),
    *(
        (HERMES, f"a \n<tool_call>{body}")
        for body in ("no", '{"x": 1}', '{"name": 3}', '{"na', "{]")
    ),
    *((MISTRAL, text) for text in ("[TOOL", "[TOOL_CALLS] none [1]", "[TOOL_CALLS][{}]")),
    *(
        (NAMED, f"a [TOOL_CALLS]{rest}")
        for rest in ("", "no call", "f[ARG", "f[CALL_ID]x", "[ARGS]{}", "f[TOOL_CALLS]", "x" * 300)
    ),
    *((LLAMA, text) for text in ("<|python", "<|python_tag|>print(1)", ' {"name": "h"}', "hi {}")),
    *(
        (PLAIN, text)
        for text in ("[1, 2]", "[", "{}", '{"answer": {"name": "f"}}', 'a {"name": "f"}')
    ),
]


@pytest.mark.parametrize(("spelling", "text", "said", "calls"), CALLS)
def test_calls(spelling: CallSpelling, text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert read(spelling, [text]) == (said, calls)
    assert read(spelling, list(text)) == (said, calls)


@pytest.mark.parametrize(("spelling", "text"), TEXTS)
def test_what_is_no_call_is_text_to_the_letter(spelling: CallSpelling, text: str) -> None:
    assert read(spelling, [text]) == (text, [])
    assert read(spelling, list(text)) == (text, [])


def test_an_empty_call_is_text() -> None:
    text = "a <tool_call> </tool_call> b"
    assert read(HERMES, [text]) == read(HERMES, list(text)) == (text, [])


def test_further_calls_are_dropped() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call> bye'
    assert read(HERMES, [text], most_calls=1) == (" bye", [("f", "{}")])


def test_names_and_arguments_are_told_at_once() -> None:
    reader = CallReader(HERMES, NAMES)
    assert reader.push('<tool_call>{"name": "f"') == [CallBegins(0, "f")]
    assert reader.push(', "arguments": {"ci') == [Arguments(0, '{"ci')]
    assert reader.push('ty": "Ba') == [Arguments(0, 'ty": "Ba')]
    assert reader.push('le"}') == [Arguments(0, 'le"}')]
    assert reader.push("}</tool_call>") == reader.end() == []


MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>")
WORDS = ('"name"', '"f"', '"arguments"', '{"name": "f", "arguments": {"a": [1, "}"]}}', "null")
ALPHABET = st.sampled_from([*'{}[]":,; \n\\x1', *MARKERS, *WORDS])


@given(
    st.sampled_from([HERMES, MISTRAL, NAMED, LLAMA, PLAIN]),
    st.lists(ALPHABET, max_size=20).map("".join),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_cuts_change_nothing(spelling: CallSpelling, text: str, cuts: list[int]) -> None:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    starts = [0, *ends[:-1]]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    whole = read(spelling, [text])
    assert read(spelling, pieces) == whole
    if not whole[1]:
        assert whole[0] == text


@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=3),
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_what_models_write_is_read_back(
    calls: list[tuple[str, dict[str, int | str]]], ascii_only: bool
) -> None:
    def written(key: str, name: str, arguments: dict[str, int | str]) -> str:
        return json.dumps({"name": name, key: arguments}, ensure_ascii=ascii_only)

    plain = [written("arguments", *call) for call in calls]
    other = [written("parameters", *call) for call in calls]
    answers = [
        read(HERMES, list("\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in plain))),
        read(MISTRAL, list(f"[TOOL_CALLS][{', '.join(plain)}]")),
        read(LLAMA, list("; ".join(other))),
        read(PLAIN, list("\n".join(plain))),
    ]
    for text, found in answers:
        assert not text.strip()
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls
