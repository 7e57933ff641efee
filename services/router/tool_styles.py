"""How models spell tool calls: a table, a chat template's style, and grammars that force calls.

Models write calls as their chat template taught them to; the template's own text tells which way.
A model whose template knows no tools is told of them in its system message, and asked for plain
JSON. Knows nothing of requests. Used by ``intake`` and ``openai_api`` through ``served_model``.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.request import Guide, GuideKind
from services.router.call_reader import CallSpelling
from services.router.chats import Tool

MAX_FORCED_CALLS = 8
"""In an answer that must call: a small model would go on for ever."""
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """One way to spell calls."""

    name: str
    signs: tuple[str, ...]
    """All of them stand in the templates of this style."""
    spelling: CallSpelling
    arguments_key: str = "arguments"
    first: str = ""
    """What stands before all calls, after ``spelling.begin``; the next ones likewise."""
    before: str = ""
    after: str = ""
    between: str = "\n"
    last: str = ""
    id_prefix: str = "call_"
    id_letters: int = 24

    @property
    def markers(self) -> tuple[str, ...]:
        """What a tokenizer may hold as one special token each."""
        spelling = self.spelling
        return tuple(filter(None, (spelling.begin or spelling.ignored, spelling.args)))

    def new_call_id(self) -> str:
        """Unique; some templates accept only ids of one form."""
        letters = (secrets.choice(_ID_LETTERS) for _ in range(self.id_letters))
        return self.id_prefix + "".join(letters)


PLAIN = ToolStyle("plain", (), CallSpelling())
STYLES = (
    ToolStyle(
        "hermes",
        ("<tool_call>",),
        CallSpelling("<tool_call>", "</tool_call>"),
        before="\n",
        after="\n</tool_call>",
        between="\n<tool_call>",
    ),
    ToolStyle(
        "mistral, named",
        ("[TOOL_CALLS]", "[ARGS]"),
        CallSpelling("[TOOL_CALLS]", args="[ARGS]", call_id="[CALL_ID]"),
        between="[TOOL_CALLS]",
        id_prefix="",
        id_letters=9,
    ),
    ToolStyle(
        "mistral",
        ("[TOOL_CALLS]",),
        CallSpelling("[TOOL_CALLS]"),
        first="[",
        between=", ",
        last="]",
        id_prefix="",
        id_letters=9,
    ),
    ToolStyle(
        "llama",
        ("<|start_header_id|>", "tools"),
        CallSpelling(ignored="<|python_tag|>"),
        arguments_key="parameters",
        between="; ",
    ),
    PLAIN,
)
"""The first whose signs a template has."""


def style_of(chat_template: str | None) -> ToolStyle:
    """The style that a template teaches."""
    text = chat_template or ""
    return next(style for style in STYLES if all(sign in text for sign in style.signs))


def shows_tools(chat_template: str | None) -> bool:
    """The template writes tools into the prompt itself."""
    return "tools" in (chat_template or "")


def forcing_guide(
    style: ToolStyle, tools: Sequence[Tool], most_calls: int, marker_ids: Mapping[str, int]
) -> Guide:
    """A guide under which the answer is calls of ``tools`` and nothing else.

    Args:
        marker_ids: the tokens that ``style.markers`` are, where they are special ones.
    """

    def marker(text: str) -> str:
        return f"<[{marker_ids[text]}]>" if text in marker_ids else _literal(text)

    begin = marker(style.spelling.begin)
    call = f"{_literal(style.before)} ({' | '.join(f'c{i}' for i in range(len(tools)))})"
    more = f"({marker(style.between)} call){{0,{most_calls - 1}}}" if most_calls > 1 else ""
    lines = [
        f"start: {begin} {_literal(style.first)} call {more} {_literal(style.last)}",
        f"call: {call} {_literal(style.after)}",
    ]
    for index, tool in enumerate(tools):
        if args := style.spelling.args:
            lines.append(f"c{index}: {_literal(tool.name)} {marker(args)} a{index}")
        else:
            opening = f'{{"name": {json.dumps(tool.name)}, "{style.arguments_key}": '
            lines.append(f'c{index}: {_literal(opening)} a{index} "}}"')
        lines.append(f"a{index}: %json {json.dumps(_strict(tool.parameters))}")
    return Guide(GuideKind.GRAMMAR, "\n".join(lines))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _strict(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of an object without members that it does not name, written as templates write."""
    schema = {"type": "object", **parameters}
    if not {"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"} & {
        *schema
    }:
        schema["additionalProperties"] = False
    written = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**schema, "x-guidance": written}


def described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: they and their calls become text."""
    shown = [_with_calls_as_text(message) for message in messages]
    if tools:
        text = "\n".join(
            (
                "You may call these functions:",
                *(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
                'To call one, answer only {"name": its name, "arguments": an object with them}.',
            )
        )
        if shown and shown[0]["role"] == "system":
            shown[0]["content"] = f"{shown[0]['content']}\n\n{text}"
        else:
            shown.insert(0, {"role": "system", "content": text})
    return shown


def _with_calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    lines = [json.dumps(call, ensure_ascii=False) for call in calls]
    content = "\n".join(([message["content"]] if message["content"] else []) + lines)
    return {"role": message["role"], "content": content}
