"""Structured output through real clients, on one instance and across a handoff."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from protos import inference_pb2 as public
from tests.e2e.harness import Cluster, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
EXACT = ("--dtype", "float32", "--weights", "float32")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with serve("demo", "--disaggregate-from", "0", *EXACT) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("seed", range(5))
def test_openai_json_schema(client: OpenAI, seed: int) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Name a city and how many people live there."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": SCHEMA, "strict": True},
        },
        max_tokens=80,
        temperature=1.0,
        seed=seed,
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


def test_choices_and_expressions(client: OpenAI) -> None:
    def ask(**extra: Any) -> str:
        answer = client.completions.create(
            model="demo", prompt="Is water wet? Answer:", max_tokens=20, extra_body=extra
        )
        return answer.choices[0].text

    assert ask(guided_choice=["yes", "no"]) in ("yes", "no")
    assert ask(structured_outputs={"regex": "[0-9]{4}"}).isdigit()
    with pytest.raises(BadRequestError, match="guided_regex"):
        ask(guided_regex="((")


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "What the weather is like somewhere.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "description": "The time now."}},
]
QUESTION: Any = [{"role": "user", "content": "What is the weather in Rome?"}]


def test_a_required_tool_call_is_well_formed(client: OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model="demo",
            messages=QUESTION,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=100,
            seed=seed,
        )
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        known = {tool["function"]["name"]: tool["function"] for tool in TOOLS}
        schema = known[call.function.name].get("parameters", {"maxProperties": 0})
        jsonschema.validate(json.loads(call.function.arguments), schema)


def test_a_named_tool_call_streams_and_is_answered(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=100,
        temperature=0,
        stream=True,
    )
    call_id, arguments, reasons = "", "", []
    for chunk in stream:
        reasons.append(chunk.choices[0].finish_reason)
        assert not chunk.choices[0].delta.content
        for piece in chunk.choices[0].delta.tool_calls or []:
            assert piece.index == 0 and piece.function is not None
            call_id += piece.id or ""
            assert piece.function.name in ("get_weather", None)
            arguments += piece.function.arguments or ""
    assert reasons[-1] == "tool_calls" and reasons.count(None) > 3
    jsonschema.validate(json.loads(arguments), TOOLS[0]["function"]["parameters"])
    called = {"id": call_id, "type": "function"}
    function = {"name": "get_weather", "arguments": arguments}
    answer = client.chat.completions.create(
        model="demo",
        messages=[
            *QUESTION,
            {"role": "assistant", "tool_calls": [called | {"function": function}]},
            {"role": "tool", "tool_call_id": call_id, "content": "Sunny, 24 degrees."},
        ],
        tools=TOOLS,
        max_tokens=16,
    )
    assert answer.usage is not None and answer.usage.prompt_tokens > 100


def test_an_answer_goes_on_with_the_last_message(client: OpenAI) -> None:
    begun: Any = [*QUESTION, {"role": "assistant", "content": "The weather in"}]
    answer = client.chat.completions.create(
        model="demo",
        messages=begun,
        max_tokens=8,
        temperature=0,
        extra_body={"continue_final_message": True},
    )
    assert (answer.choices[0].message.content or "").startswith(" Rome")


def test_a_guide_crosses_the_handoff(cluster: Cluster) -> None:
    guided = public.GuidedDecoding(json_schema=json.dumps(SCHEMA))
    asked = {"prompt": "A city: ", "temperature": 0.9, "seed": 4, "max_tokens": 60}
    moved = cluster.generate(**asked, guided=guided)
    assert moved.finished is not None and moved.finished.timeline.prefill_instance
    jsonschema.validate(json.loads(moved.text), SCHEMA)
    with serve("demo", "--colocated", "1", *EXACT) as alone:
        stayed = alone.generate(**asked, guided=guided)
    assert (stayed.token_ids, stayed.text) == (moved.token_ids, moved.text)
