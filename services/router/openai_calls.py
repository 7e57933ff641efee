"""Tool calls in OpenAI's form, whole and in deltas. Pure. Used by ``openai_answers``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.router.call_reader import Arguments, CallBegins, CallReader, Part, Text

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Calling:
    """How the calls of a response are read."""

    new_reader: Callable[[], CallReader]
    new_call_id: Callable[[], str]


def delta(parts: Sequence[Part], new_call_id: Callable[[], str]) -> Json:
    """What is new in an answer: text, calls, pieces of their arguments."""
    content = "".join(part.text for part in parts if isinstance(part, Text))
    calls: list[Json] = []
    for part in parts:
        match part:
            case CallBegins(index, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": new_call_id(), "type": "function"}
                calls.append(call | {"function": function})
            case Arguments(index, text) if calls and calls[-1]["index"] == index:
                calls[-1]["function"]["arguments"] += text
            case Arguments(index, text):
                calls.append({"index": index, "function": {"arguments": text}})
    return ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})


def message(parts: Sequence[Part], new_call_id: Callable[[], str]) -> Json:
    """A whole answer; content is null where there are only calls."""
    whole = delta(parts, new_call_id)
    calls = whole.get("tool_calls", [])
    for call in calls:
        del call["index"]
    content = whole.get("content", None if calls else "")
    said: Json = {"role": "assistant", "content": content, "refusal": None}
    return said | ({"tool_calls": calls} if calls else {})
