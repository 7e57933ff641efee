"""The chat of an OpenAI client: messages, tools and how to choose among them.

Knows nothing of sampling or HTTP. Used by ``openai_schemas``.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from services.router.chats import (
    MAX_CALLS,
    MAX_TOOLS,
    Chat,
    ChatTurn,
    Tool,
    ToolCall,
    ToolChoice,
    check_count,
    check_number_of_messages,
    check_tools,
    parse_object,
)
from services.runtime.errors import InvalidArgument

Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong item refuses it: an error an item would be gigabytes of errors."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class ContentPart(_Part):
    """One part of a message's content."""

    type: str
    text: str | None = None


class CalledFunction(_Part):
    """What a call in the history calls."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CallBody(_Part):
    """A call in the history."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def call(self, name: str) -> ToolCall:
        """Raises: InvalidArgument: arguments that are no JSON object; ``name`` is this call."""
        given = self.function.arguments
        where = f"{name}.function.arguments"
        arguments = parse_object(given, where) if isinstance(given, str) and given else given
        return ToolCall(self.id, self.function.name, arguments if arguments else {})


class Message(_Part):
    """One message of a chat."""

    role: str
    content: str | Listed[ContentPart] | None = None
    tool_calls: Listed[CallBody] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def turn(self, name: str) -> ChatTurn:
        """Raises: InvalidArgument: content that is not text; ``name`` is this message."""
        extra = self.model_extra or {}
        for field in ("function_call", "audio"):
            if extra.get(field):
                raise InvalidArgument(f"{name}.{field}", "is not supported")
        if self.content is None and self.role != "assistant":
            raise InvalidArgument(f"{name}.content", "is missing")
        content = self.content or ""
        if isinstance(content, list):
            parts = enumerate(content)
            content = "".join(_part_text(part, f"{name}.content[{i}]") for i, part in parts)
        called = self.tool_calls or []
        check_count(len(called), MAX_CALLS, f"{name}.tool_calls", "calls")
        calls = tuple(each.call(f"{name}.tool_calls[{i}]") for i, each in enumerate(called))
        return ChatTurn(self.role, content, calls, self.tool_call_id or "", self.name or "")


class FunctionBody(_Part):
    """What a tool is."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolBody(_Part):
    """One of ``tools``."""

    type: Literal["function"]
    function: FunctionBody


class NamedFunction(_Part):
    """A function by its name."""

    name: str


class NamedTool(_Part):
    """``tool_choice`` of one function."""

    type: Literal["function"]
    function: NamedFunction


class ChatFields(_Part):
    """The fields of a body that make its chat."""

    messages: Listed[Message]
    tools: Listed[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> Chat:
        """Raises: InvalidArgument: names the field."""
        check_number_of_messages(len(self.messages), "messages")
        turns = tuple(each.turn(f"messages[{i}]") for i, each in enumerate(self.messages))
        tools = self._tools()
        choice, forced = self._choice(tools)
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            raise InvalidArgument(
                "continue_final_message", "cannot go with add_generation_prompt true"
            )
        return Chat(
            turns,
            tools,
            tool_choice=choice,
            forced_tool=forced,
            parallel_calls=self.parallel_tool_calls is not False,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=continues,
            template_kwargs=self.chat_template_kwargs or {},
        )

    def _tools(self) -> tuple[Tool, ...]:
        given = self.tools or []
        check_count(len(given), MAX_TOOLS, "tools", "tools")
        functions = [each.function for each in given]
        tools = tuple(Tool(f.name, f.description or "", f.parameters or {}) for f in functions)
        check_tools(tools, "tools[{}].function.name")
        return tools

    def _choice(self, tools: tuple[Tool, ...]) -> tuple[ToolChoice, str]:
        """The choice, and the one tool that must be called, if it is one."""
        given = self.tool_choice
        if given is None or given in ("none", "auto"):
            return ToolChoice(given or "auto"), ""
        if isinstance(given, NamedTool):
            name = given.function.name
            if name not in {tool.name for tool in tools}:
                raise InvalidArgument(
                    "tool_choice.function.name", f"{name[:64]!r} is not one of the tools"
                )
            return ToolChoice.REQUIRED, name
        if not tools:
            raise InvalidArgument("tool_choice", "must be none or auto where there are no tools")
        return ToolChoice.REQUIRED, ""


EXPECTED: Mapping[str, str] = {
    "content": "must be a text or a list of parts",
    "messages": "must be a list of messages",
    "tools": "must be a list of tools",
    "tool_choice": "must be none, auto, required, or a function by its name",
    "arguments": "must be JSON in a string",
}
"""Field -> what it should be, where it can be several things."""


def _part_text(part: ContentPart, name: str) -> str:
    if part.type != "text":
        raise InvalidArgument(f"{name}.type", f"{part.type[:50]!r} is not supported, only text")
    if part.text is None:
        raise InvalidArgument(f"{name}.text", "is missing")
    return part.text
