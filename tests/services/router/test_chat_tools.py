"""Chats with tools over both faces: what reaches the model, what comes back, what is refused."""

import json
from typing import Any

import httpx
import openai
import pytest

from protos import inference_pb2 as public
from services.router.chats import MAX_TOOLS
from services.runtime.settings import Role
from tests.services.router.conftest import StartRouter, byte_model
from tests.services.router.fake_worker import Script
from tests.services.router.harness import TestCluster

USER = {"role": "user", "content": "hi"}
FUNCTION: dict[str, Any] = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOL = {"type": "function", "function": FUNCTION}
HERMES_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{{ '\\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}:{{ c.function.arguments | tojson }}>"
    "{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ mood | default('assistant') }}:{% endif %}"
)
CALL = 'Ok.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


async def start(start_router: StartRouter, answer: str) -> TestCluster:
    script = Script(stop_at=len(answer), answer=answer)
    model = byte_model(chat_template=HERMES_TEMPLATE)
    return await start_router(decode=1, script=script, model=model)


def client(cluster: TestCluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=10
    )


def prompt(cluster: TestCluster) -> str:
    return bytes(cluster.worker(Role.DECODE).starts[-1].request.prompt_token_ids).decode()


async def test_a_whole_answer_with_a_call(start_router: StartRouter) -> None:
    cluster = await start(start_router, CALL)
    async with client(cluster) as ask:
        answer = await ask.chat.completions.create(model="bytes", messages=[USER], tools=[TOOL])
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Ok.")
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert (call.function.name, call.function.arguments) == ("f", '{"a": 1}')
    assert prompt(cluster) == (
        '[{"type": "function", "function": '
        + json.dumps(FUNCTION)
        + "}] <tool_call>\nuser: hi\nassistant:"
    )


async def test_a_streamed_answer_with_two_calls(start_router: StartRouter) -> None:
    cluster = await start(start_router, CALL + CALL.removeprefix("Ok."))
    async with client(cluster) as ask:
        stream = await ask.chat.completions.create(
            model="bytes", messages=[USER], tools=[TOOL], stream=True
        )
        chunks = [chunk async for chunk in stream]
    text, names, arguments = "", list[str](), ["", ""]
    for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or []:
            assert call.function is not None
            if call.function.name:
                assert call.id and call.type == "function" and call.index == len(names)
                names.append(call.function.name)
            arguments[call.index] += call.function.arguments or ""
    assert (text, names, arguments) == ("Ok.", ["f", "f"], ['{"a": 1}'] * 2)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "tool_calls"]
    assert len(chunks) > 10  # arguments came piece by piece


async def test_one_call_where_parallel_ones_are_not_wanted(start_router: StartRouter) -> None:
    cluster = await start(start_router, CALL * 2)
    async with client(cluster) as ask:
        answer = await ask.chat.completions.create(
            model="bytes", messages=[USER], tools=[TOOL], parallel_tool_calls=False
        )
    assert len(answer.choices[0].message.tool_calls or []) == 1


@pytest.mark.parametrize("choice", ["none", None])
async def test_without_tools_calls_are_text(start_router: StartRouter, choice: str | None) -> None:
    cluster = await start(start_router, CALL)
    extra = {"tools": [TOOL], "tool_choice": choice} if choice else {}
    async with client(cluster) as ask:
        answer = await ask.chat.completions.create(model="bytes", messages=[USER], extra_body=extra)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].message.tool_calls is None
    assert prompt(cluster) == "user: hi\nassistant:"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=str
)
async def test_required_calls_are_guided(start_router: StartRouter, choice: Any) -> None:
    cluster = await start(start_router, CALL.removeprefix("Ok.\n"))
    other = {"type": "function", "function": {"name": "g"}}
    async with client(cluster) as ask:
        answer = await ask.chat.completions.create(
            model="bytes", messages=[USER], tools=[TOOL, other], tool_choice=choice
        )
    assert answer.choices[0].message.content is None
    sampling = cluster.worker(Role.DECODE).starts[0].request.sampling
    assert sampling.guided.WhichOneof("kind") == "grammar"
    assert "<tool_call>" in sampling.guided.grammar
    assert ('\\"g\\"' in sampling.guided.grammar) is (choice == "required")


async def test_history_and_arguments_reach_the_template(start_router: StartRouter) -> None:
    cluster = await start(start_router, "x")
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 2}'}}
    messages: list[Any] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "c1"},
    ]
    async with client(cluster) as ask:
        await ask.chat.completions.create(
            model="bytes",
            messages=messages,
            extra_body={"chat_template_kwargs": {"mood": "cheerful"}},
        )
        assert prompt(cluster) == 'user: hi\nassistant: <f:{"a": 2}>\ntool: 3(c1)\ncheerful:'
        begun = [USER, {"role": "assistant", "content": "Once"}]
        await ask.chat.completions.create(
            model="bytes", messages=begun, extra_body={"continue_final_message": True}
        )
        assert prompt(cluster) == "user: hi\nassistant: Once"
        await ask.chat.completions.create(
            model="bytes", messages=[USER], extra_body={"add_generation_prompt": False}
        )
        assert prompt(cluster) == "user: hi\n"


async def test_grpc_chats_have_tools_too(start_router: StartRouter) -> None:
    cluster = await start(start_router, "x")
    call = public.ToolCall(id="c1", name="f", arguments='{"a": 2}')
    chat = public.ChatMessages(
        messages=[
            public.ChatMessage(role="user", content="hi"),
            public.ChatMessage(role="assistant", content="Well", tool_calls=[call]),
        ],
        tools=[public.Tool(name="f", description="d")],
        continue_final_message=True,
    )
    told = await cluster.stub.Tokenize(public.TokenizeRequest(chat=chat), timeout=10)
    text = bytes(told.token_ids).decode()
    assert text.startswith('[{"type": "function", "function": {"name": "f"')
    assert text.endswith("assistant: Well")


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": 3}, "tools", "must be a list of tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
    ({"tools": [{"type": "x", "function": FUNCTION}]}, "tools[0].type", "function"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "twice"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        "must be 1 to 64",
    ),
    ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools", "128 are allowed"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "must be none, auto"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "h"}}},
        "tool_choice.function.name",
        "not one of the tools",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
            "tool_choice": "required",
        },
        "tools",
        "",
    ),
    (
        {"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"},
        "guided_regex",
        "required tool call",
    ),
    (
        {"tools": [TOOL], "tool_choice": "required", "ignore_eos": True},
        "tools",
        "ignore_eos",
    ),
    (
        {"continue_final_message": True},
        "continue_final_message",
        "assistant's message",
    ),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "cannot go with",
    ),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "name"),
    ({"chat_template_kwargs": {"a": "x" * 5000}}, "chat_template_kwargs", "longer than"),
    ({"chat_template_kwargs": {f"a{i}": 1 for i in range(33)}}, "chat_template_kwargs", "33"),
    (
        {
            "messages": [
                {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}
            ]
        },
        "messages[0].tool_calls",
        "only an assistant",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "[1]"}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
        "not a JSON object",
    ),
    (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c" * 300}]},
        "messages[0]",
        "longer than 256",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 100_000}}]},
        "messages",
        "characters long",
    ),
]


async def test_bad_chats_name_the_field(start_router: StartRouter) -> None:
    cluster = await start(start_router, "x")
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False) as http:
        for fields, param, part in BAD:
            answer = await http.post("/v1/chat/completions", json={"messages": [USER], **fields})
            assert answer.status_code == 400, (fields, answer.text)
            error = answer.json()["error"]
            assert (error["param"], part in error["message"]) == (param, True), (fields, error)
    assert not cluster.worker(Role.DECODE).starts
