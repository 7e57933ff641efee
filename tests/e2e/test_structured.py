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


def test_a_guide_crosses_the_handoff(cluster: Cluster) -> None:
    guided = public.GuidedDecoding(json_schema=json.dumps(SCHEMA))
    asked = {"prompt": "A city: ", "temperature": 0.9, "seed": 4, "max_tokens": 60}
    moved = cluster.generate(**asked, guided=guided)
    assert moved.finished is not None and moved.finished.timeline.prefill_instance
    jsonschema.validate(json.loads(moved.text), SCHEMA)
    with serve("demo", "--colocated", "1", *EXACT) as alone:
        stayed = alone.generate(**asked, guided=guided)
    assert (stayed.token_ids, stayed.text) == (moved.token_ids, moved.text)
