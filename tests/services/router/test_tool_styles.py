"""Styles are told by the template; what a style forces is what its reader reads."""

import json
import random
from functools import cache

import jsonschema
import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.guide import Guides
from engine.loaders.open import open_model
from engine.tokenizer import ByteTokenizer
from services.router.call_reader import CallReader
from services.router.chats import Tool
from services.router.tool_styles import (
    MAX_FORCED_CALLS,
    PLAIN,
    STYLES,
    ToolStyle,
    described,
    forcing_guide,
    shows_tools,
    style_of,
)
from tests.services.router.test_call_reader import gather

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/City"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "$defs": {"City": {"enum": ["Bâle", 'The "Hague"', "Rome"]}},
}
WEATHER = Tool("get_weather", "What the sky does.", PARAMETERS)
NOW = Tool("now")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "plain"),
        ("{{ messages }}", "plain"),
        ("{% for t in tools %}{{ t | tojson }}{% endfor %}", "plain"),
        ("... return a json object within <tool_call></tool_call> XML tags ...", "hermes"),
        ("{{- ' [TOOL_CALLS] [' }}", "mistral"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral, named"),
        ("<|start_header_id|>{% if tools is not none %}<|python_tag|>", "llama"),
        ("<|start_header_id|>{{ messages }}", "plain"),
    ],
)
def test_the_template_tells_the_style(template: str | None, name: str) -> None:
    assert style_of(template).name == name


def test_the_demo_model_is_told_of_tools() -> None:
    template = open_model("demo").tokenizer().chat_template
    assert style_of(template) is PLAIN and not shows_tools(template)


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_call_ids_are_unique_and_of_the_styles_form(style: ToolStyle) -> None:
    made = {style.new_call_id() for _ in range(50)}
    assert len(made) == 50
    assert all(each.removeprefix(style.id_prefix).isalnum() for each in made)


@cache
def byte_guides() -> Guides:
    return Guides(ByteTokenizer(), 258)


def drawn(style: ToolStyle, most_calls: int, seed: int) -> str:
    """An answer of which every token was drawn at random from what the guide allows."""
    guide = forcing_guide(style, [WEATHER, NOW], most_calls, {})
    chance, output = random.Random(seed), list[int]()
    while len(output) < 2000:
        words = byte_guides().mask(f"{style.name}-{most_calls}-{seed}", guide, output)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:258]
        token_id = chance.choice(np.flatnonzero(bits).tolist())
        if token_id == ByteTokenizer.EOS:
            return bytes(output).decode()
        output.append(token_id)
    raise AssertionError("the answer does not end")


@pytest.mark.parametrize("most_calls", [1, MAX_FORCED_CALLS])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_forced_answers_are_calls_and_nothing_else(style: ToolStyle, most_calls: int) -> None:
    numbers = set()
    for seed in range(25):
        answer = drawn(style, most_calls, seed)
        reader = CallReader(style.spelling, {"get_weather", "now"})
        text, calls = gather(reader.push(answer) + reader.end())
        assert not text.strip() and 1 <= len(calls) <= most_calls, answer
        for name, arguments in calls:
            schema = PARAMETERS if name == "get_weather" else {"maxProperties": 0}
            jsonschema.validate(json.loads(arguments), schema)
        numbers.add(len(calls))
    assert (numbers == {1}) is (most_calls == 1)


def test_a_marker_that_is_a_special_token_is_forced_as_that_token() -> None:
    mistral = next(style for style in STYLES if style.name == "mistral")
    guide = forcing_guide(mistral, [NOW], 1, {"[TOOL_CALLS]": ByteTokenizer.BOS})
    words = byte_guides().mask("special", guide, [])
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:258]
    assert np.flatnonzero(bits).tolist() == [ByteTokenizer.BOS]


def test_a_schema_that_is_none_is_refused() -> None:
    guide = forcing_guide(PLAIN, [Tool("f", "", {"type": "wizard"})], 1, {})
    with pytest.raises(InvalidRequest, match="wizard"):
        byte_guides().check(guide)


def test_templates_without_tools_get_them_as_text() -> None:
    call = {"function": {"name": "now", "arguments": {"zone": "é"}}}
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12:00", "tool_call_id": "c"},
    ]
    tools = [{"type": "function", "function": {"name": "now", "description": "The time."}}]
    shown = described(messages, tools)
    assert [each["role"] for each in shown] == ["system", "user", "assistant", "tool"]
    assert '{"name": "now", "description": "The time."}' in shown[0]["content"]
    assert shown[2] == {
        "role": "assistant",
        "content": '{"name": "now", "arguments": {"zone": "é"}}',
    }
    system = {"role": "system", "content": "Be brief."}
    assert described([system], tools)[0]["content"].startswith("Be brief.\n\nYou may call")
    assert described([system], []) == [system]
