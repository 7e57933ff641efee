"""A chat as both faces bring it, and as chat templates read it. Checked here, once.

Knows nothing of gRPC, JSON bodies or how a model spells its calls. Made by ``inference`` and
``openai_messages``, used by ``intake``.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engine.chat import RESERVED_NAMES
from services.runtime.errors import InvalidArgument

MAX_CHAT_MESSAGES = 4096
MAX_TOOLS = 128
MAX_CALLS = 128
"""In one message."""
MAX_ID_CHARACTERS = 256
MAX_TEMPLATE_ARGUMENTS = 32
MAX_TEMPLATE_ARGUMENT_CHARACTERS = 4096
"""Of all of them together, as JSON."""
CHAT_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolChoice(StrEnum):
    """Whether the answer calls tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """A JSON schema; empty: it takes any object."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in the history."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a chat."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Of a tool: which call its content answers."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages instead of a prompt, and what the answer may call."""

    turns: tuple[ChatTurn, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice.AUTO
    forced_tool: str = ""
    """With REQUIRED: the one to call; empty: any."""
    parallel_calls: bool = True
    """More than one call in an answer."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        return () if self.tool_choice is ToolChoice.NONE else self.tools

    @property
    def most_calls(self) -> int | None:
        """In an answer; None: no limit."""
        return None if self.parallel_calls and not self.forced_tool else 1

    @property
    def num_characters(self) -> int:
        """About how long a prompt it makes."""
        turns = sum(
            len(turn.content) + sum(len(str(call.arguments)) for call in turn.tool_calls)
            for turn in self.turns
        )
        return turns + sum(len(t.description) + len(str(t.parameters)) for t in self.offered)


def check_count(count: int, most: int, name: str, what: str) -> None:
    """For faces: before they take a list apart.

    Raises:
        InvalidArgument: there are too many.
    """
    if count > most:
        raise InvalidArgument(name, f"{count} {what}, {most} are allowed")


def check_number_of_messages(count: int, name: str) -> None:
    """Raises: InvalidArgument: there are too many."""
    check_count(count, MAX_CHAT_MESSAGES, name, "messages")


def parse_object(source: str, name: str) -> Mapping[str, Any]:
    """A JSON object from a client's text.

    Raises:
        InvalidArgument: it is none; names ``name``.
    """
    try:
        value = json.loads(source)
    except (ValueError, RecursionError):
        raise InvalidArgument(name, "is not valid JSON") from None
    if not isinstance(value, dict):
        raise InvalidArgument(name, "is not a JSON object")
    return value


def check_tools(tools: Sequence[Tool], spelling: str) -> None:
    """Refuse names that are none, or that two tools have.

    Args:
        spelling: what the client calls the name of tool ``{}``.

    Raises:
        InvalidArgument: names it.
    """
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        where = spelling.format(index)
        if not _TOOL_NAME.fullmatch(tool.name):
            raise InvalidArgument(where, "must be 1 to 64 of A-Z, a-z, 0-9, '_', '.' and '-'")
        if tool.name in seen:
            raise InvalidArgument(where, f"{tool.name!r} is there twice")
        seen.add(tool.name)


def check_chat(chat: Chat, name: str) -> None:
    """What can be said of a chat without rendering it.

    Raises:
        InvalidArgument: names the message, or what is wrong beside them.
    """
    for index, turn in enumerate(chat.turns):
        where = f"{name}[{index}]"
        if turn.role not in CHAT_ROLES:
            raise InvalidArgument(
                f"{where}.role", f"{turn.role[:50]!r} is none of {', '.join(sorted(CHAT_ROLES))}"
            )
        if turn.tool_calls and turn.role != "assistant":
            raise InvalidArgument(f"{where}.tool_calls", "only an assistant calls tools")
        for said in (turn.tool_call_id, turn.name, *(call.call_id for call in turn.tool_calls)):
            if len(said) > MAX_ID_CHARACTERS:
                raise InvalidArgument(
                    where, f"an id or a name is longer than {MAX_ID_CHARACTERS} characters"
                )
    beside, last = name.removesuffix("messages"), chat.turns[-1]
    if chat.continue_final_message and (last.role != "assistant" or not last.content):
        raise InvalidArgument(
            f"{beside}continue_final_message",
            "needs an assistant's message with content as the last one",
        )
    _check_template_kwargs(chat.template_kwargs)


def _check_template_kwargs(given: Mapping[str, Any]) -> None:
    name = "chat_template_kwargs"
    check_count(len(given), MAX_TEMPLATE_ARGUMENTS, name, "arguments")
    if reserved := sorted(RESERVED_NAMES & set(given)):
        raise InvalidArgument(
            name, f"{reserved[0]!r} has a field of its own, or is not for clients"
        )
    if any(not key.isidentifier() for key in given):
        raise InvalidArgument(name, "every key must be a name")
    if len(json.dumps(given)) > MAX_TEMPLATE_ARGUMENT_CHARACTERS:
        raise InvalidArgument(name, f"is longer than {MAX_TEMPLATE_ARGUMENT_CHARACTERS} characters")


def template_messages(turns: Sequence[ChatTurn]) -> list[dict[str, Any]]:
    """Messages as chat templates read them; keys that a message lacks are not there."""
    return [_message(turn) for turn in turns]


def _message(turn: ChatTurn) -> dict[str, Any]:
    # What OpenAI now calls developer, templates know as system.
    role = "system" if turn.role == "developer" else turn.role
    message: dict[str, Any] = {"role": role, "content": turn.content}
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in turn.tool_calls
        ]
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    if turn.name:
        message["name"] = turn.name
    return message


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as chat templates read them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]
