"""Clients that people already have: openai, plain HTTP, and gRPC with nothing but reflection."""

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.e2e.harness import Cluster, eventually

CHAT: list[Any] = [{"role": "user", "content": "Say something."}]


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    url = f"{cluster.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as opened:
        yield opened


def model_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_openai_chat_streamed_equals_whole(client: openai.OpenAI) -> None:
    model = model_of(client)
    whole = client.chat.completions.create(
        model=model, messages=CHAT, temperature=0, max_tokens=20, extra_body={"ignore_eos": True}
    )
    assert whole.usage is not None and whole.usage.completion_tokens == 20
    assert whole.choices[0].finish_reason == "length"
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=CHAT,
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 20
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_openai_completion_from_text_and_from_ids(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": model_of(client),
        "temperature": 0,
        "max_tokens": 12,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    from_text = client.completions.create(prompt="hello there", **asked)
    ids = from_text.choices[0].model_extra["prompt_token_ids"]
    from_ids = client.completions.create(prompt=ids, **asked)
    assert from_ids.choices[0].text == from_text.choices[0].text
    assert len(from_ids.choices[0].model_extra["token_ids"]) == 12


def test_openai_cached_tokens(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": model_of(client), "prompt": "again and again " * 20}
    client.completions.create(max_tokens=2, **asked)
    usage = client.completions.create(max_tokens=2, **asked).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": "no-such-model"}, openai.NotFoundError, "no-such-model"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": -4}, openai.BadRequestError, "max_tokens"),
        ({"temperature": 99}, openai.BadRequestError, "temperature"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": "x" * 5000}, openai.BadRequestError, "prompt"),
        ({"prompt": {"a": 1}}, openai.BadRequestError, "prompt"),
        ({"prompt": [1, -5]}, openai.BadRequestError, "prompt"),
        ({"prompt": [999999]}, openai.BadRequestError, "prompt"),
        ({"n": 17}, openai.BadRequestError, "n"),
        ({"stop": ["x"] * 10_000}, openai.BadRequestError, "stop"),
    ],
)
def test_openai_bad_input(
    client: openai.OpenAI, change: dict[str, Any], error: type[Exception], says: str
) -> None:
    asked: dict[str, Any] = {"model": model_of(client), "prompt": "hi", "max_tokens": 4}
    with pytest.raises(error) as caught:
        client.completions.create(**{**asked, **change})
    assert says in str(caught.value)


def test_http_health_ready_and_metrics(cluster: Cluster) -> None:
    for path in ("/health", "/ready"):
        with urllib.request.urlopen(cluster.url + path, timeout=5) as answer:
            assert answer.status == 200
    before = metric(cluster.http_address, "kvrelay_requests_total")
    cluster.generate(prompt="count me " * 20, max_tokens=3, ignore_eos=True)
    assert metric(cluster.http_address, "kvrelay_requests_total") == before + 1
    prefill = cluster.instances("prefill")[0]["metrics_address"]
    decode = cluster.instances("decode")[0]["metrics_address"]
    assert metric(prefill, "kvrelay_handoff_bytes_total") > 0
    assert metric(prefill, "kvrelay_handoff_hidden_ratio_count") > 0
    eventually(lambda: metric(decode, "kvrelay_output_tokens_total") > 0, 2, "tokens counted")
    eventually(lambda: metric(decode, "kvrelay_kv_blocks") > 0, 2, "blocks shown")


def metric(address: str, name: str) -> float:
    """The sum of all samples of a metric."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    values = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


class Reflected:
    """A client that knows an address and a service's name, like grpcurl."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        self._channel = channel
        self._ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        self._pool = descriptor_pool.DescriptorPool()
        self._add(reflection_pb2.ServerReflectionRequest(file_containing_symbol=service))
        self._service = self._pool.FindServiceByName(service)

    def services(self) -> set[str]:
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = self._ask(iter([asked]))
        return {s.name for s in answer.list_services_response.service}

    def _add(self, asked: reflection_pb2.ServerReflectionRequest) -> None:
        (answer,) = self._ask(iter([asked]))
        for raw in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            for dependency in file.dependency:
                self._add(reflection_pb2.ServerReflectionRequest(file_by_filename=dependency))
            self._pool.Add(file)

    def stream(self, method: str, request_json: dict[str, Any]) -> list[Any]:
        from google.protobuf import json_format

        found = self._service.methods_by_name[method]
        ask, answer = map(message_factory.GetMessageClass, (found.input_type, found.output_type))
        call = self._channel.unary_stream(
            f"/{self._service.full_name}/{method}",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        message = json_format.ParseDict(request_json, ask())
        return [json.loads(json_format.MessageToJson(m)) for m in call(message, timeout=30)]


def test_reflection_only_client(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        client = Reflected(channel, "kvrelay.v1.Inference")
        assert {"kvrelay.v1.Inference", "grpc.health.v1.Health"} <= client.services()
        assert "kvrelay.v1.KvTransfer" not in client.services()
        answers = client.stream(
            "Generate",
            {"prompt": "hello", "sampling": {"temperature": 0, "maxTokens": 5, "ignoreEos": True}},
        )
        assert "accepted" in answers[0]
        assert answers[-1]["finished"]["finishReason"] == "FINISH_REASON_LENGTH"
        assert answers[-1]["finished"]["usage"]["outputTokens"] == 5
        assert "".join(a.get("tokens", {}).get("text", "") for a in answers)
