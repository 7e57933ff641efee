"""Everything a client can get wrong, over both faces: the right code, the field's name, no work."""

import json
from typing import Any

import grpc
import httpx
import pytest
from pydantic import BaseModel, ValidationError

from protos import inference_pb2 as public
from services.router.openai_schemas import ChatBody, CompletionBody
from services.runtime.settings import Role
from tests.services.router.conftest import StartRouter, byte_model
from tests.services.router.harness import TestCluster, collect, generate_request

NAN, INF = float("nan"), float("inf")
# prompt, other fields, what the error begins with
GRPC_CASES: list[tuple[Any, dict[str, Any], str]] = [
    ("", {}, "prompt: is empty"),
    ([], {}, "prompt_token_ids: is empty"),
    ("x" * 512, {}, "prompt: is 512 tokens long; the context is 512 tokens"),
    ([1] * 600, {}, "prompt_token_ids: is 600 tokens long; the context is 512"),
    ([1, 258], {}, "prompt_token_ids: token id 258 is not in 0 to 257"),
    ([2**32 - 1], {}, "prompt_token_ids: token id 4294967295"),
    ([("wizard", "hi")], {}, "chat.messages[0].role: 'wizard' is none of"),
    ("ab", {"max_tokens": 0}, "sampling.max_tokens: 0 is less than 1"),
    ("ab", {"max_tokens": -5}, "sampling.max_tokens: -5"),
    ("ab", {"temperature": NAN}, "sampling.temperature: nan"),
    ("ab", {"temperature": INF}, "sampling.temperature: inf"),
    ("ab", {"temperature": -0.1}, "sampling.temperature: -0.1"),
    ("ab", {"temperature": 2.1}, "sampling.temperature: 2.1"),
    ("ab", {"top_p": 0.0}, "sampling.top_p: 0 "),
    ("ab", {"top_p": 1.5}, "sampling.top_p: 1.5"),
    ("ab", {"top_p": NAN}, "sampling.top_p: nan"),
    ("ab", {"n": 17}, "sampling.n: 17 is not in 1 to 16"),
    ("ab", {"top_k": 2**32 - 1}, "sampling.top_k: "),
    ("ab", {"stop": ["x"] * 10_000}, "sampling.stop: 10000 stop strings, 16 are allowed"),
    ("ab", {"stop": [""]}, "sampling.stop: a stop string has 0 characters"),
    ("ab", {"stop": ["x" * 10_000]}, "sampling.stop: a stop string has 10000 characters"),
    ("ab", {"stop_token_ids": [258]}, "sampling.stop_token_ids: token id 258"),
    ("ab", {"stop_token_ids": [1] * 65}, "sampling.stop_token_ids: 65 ids"),
    ("ab", {"prompt_logprobs": 21}, "sampling.prompt_logprobs: 21 is not in 0 to 20"),
    ("ab", {"guided": public.GuidedDecoding()}, "sampling.guided: is empty"),
    ("ab", {"guided": public.GuidedDecoding(regex="((")}, "sampling.guided: "),
    ("ab", {"guided": public.GuidedDecoding(regex="x" * 65_537)}, "sampling.guided: a guide has"),
    ("ab", {"guided": public.GuidedDecoding(json_schema="{")}, "sampling.guided: the schema"),
    (
        "ab",
        {"guided": public.GuidedDecoding(choice=public.Choices())},
        "sampling.guided: has no choices",
    ),
    (
        "ab",
        {"guided": public.GuidedDecoding(json_object=True), "ignore_eos": True},
        "sampling.guided: cannot go with ignore_eos",
    ),
    ("ab", {"min_p": NAN}, "sampling.min_p: nan"),
    ("ab", {"repetition_penalty": INF}, "sampling.repetition_penalty: inf"),
    ("ab", {"logit_bias": {5: NAN}}, "sampling.logit_bias: nan"),
    ("ab", {"logit_bias": {i: 1.0 for i in range(1025)}}, "sampling.logit_bias: 1025 entries"),
    ("ab", {"logprobs": 21}, "sampling.logprobs: 21 is not in 0 to 20"),
    ("ab", {"client_request_id": "x" * 257}, "client_request_id: is longer than 256"),
]


@pytest.fixture
async def cluster(start_router: StartRouter) -> TestCluster:
    return await start_router(prefill=1, decode=1)


def _worked(cluster: TestCluster) -> int:
    return sum(len(worker.starts) for worker in cluster.workers)


async def _error(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value.code(), caught.value.details() or ""


async def test_grpc_names_the_field(cluster: TestCluster) -> None:
    for prompt, fields, beginning in GRPC_CASES:
        request = generate_request(prompt, **fields)
        if prompt == []:
            request.prompt_token_ids.SetInParent()
        code, details = await _error(cluster.stub.Generate(request, timeout=10))
        assert code is grpc.StatusCode.INVALID_ARGUMENT, (prompt, fields)
        assert details.startswith(beginning), details
        assert "\n" not in details and len(details) < 600
    assert _worked(cluster) == 0
    assert cluster.outcome("invalid_argument") == len(GRPC_CASES)


async def test_grpc_without_any_prompt(cluster: TestCluster) -> None:
    code, details = await _error(cluster.stub.Generate(public.GenerateRequest(), timeout=10))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "prompt: is missing: give prompt, prompt_token_ids or chat"
    empty_chat = public.GenerateRequest(chat=public.ChatMessages())
    code, details = await _error(cluster.stub.Generate(empty_chat, timeout=10))
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "chat.messages: is empty")


async def test_grpc_unknown_model(cluster: TestCluster) -> None:
    request = generate_request("ab", model="gpt-9")
    code, details = await _error(cluster.stub.Generate(request, timeout=10))
    assert code is grpc.StatusCode.NOT_FOUND
    assert details == "model: 'gpt-9' is not served here; there is bytes, demo"
    got = await collect(
        cluster.stub.Generate(generate_request("ab", model="demo", max_tokens=1), timeout=10)
    )
    assert got.text == "a"


@pytest.mark.parametrize("data", [b"\x0a\x02\xff\xfe", b"\xff\xff\xff", b"\x0a\x7fshort"])
@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_bytes_that_are_no_message_are_the_clients_fault(
    cluster: TestCluster, data: bytes, method: str
) -> None:
    path = f"/kvrelay.v1.Inference/{method}"
    if method == "Generate":
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.channel.unary_stream(path)(data, timeout=10).read()
    else:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.channel.unary_unary(path)(data, timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a message of this method" in (caught.value.details() or "")


async def test_tokenize_names_the_field(cluster: TestCluster) -> None:
    for request, details in (
        (public.TokenizeRequest(), "prompt: is missing"),
        (public.TokenizeRequest(prompt=""), "prompt: is empty"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.stub.Tokenize(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(details)


@pytest.mark.parametrize("face", ["prompt", "chat.messages"])
async def test_a_text_too_long_for_any_context_is_not_even_encoded(
    start_router: StartRouter, face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = byte_model()
    monkeypatch.setattr(model.tokenizer, "encode", lambda *a, **k: pytest.fail("encoded"))
    cluster = await start_router(prefill=1, decode=1, model=model)
    text = "x" * (model.max_prompt_characters + 1)
    given: Any = text if face == "prompt" else [("user", text)]
    code, details = await _error(cluster.stub.Generate(generate_request(given), timeout=10))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(f"{face}: is {len(text)} characters long")


async def test_messages_are_counted_before_they_are_looked_at(cluster: TestCluster) -> None:
    request = generate_request([("user", "")] * 5000)
    code, details = await _error(cluster.stub.Generate(request, timeout=10))
    assert (code, details) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "chat.messages: 5000 messages, 4096 are allowed",
    )


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [1.5] * 10_000}),
        (CompletionBody, {"prompt": ["a", *[1] * 10_000]}),
        (CompletionBody, {"prompt": [[1.5] * 10_000, *[{}] * 10_000]}),
        (CompletionBody, {"prompt": "a", "stop": [1] * 10_000}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": ["x"] * 10_000}),
        (ChatBody, {"messages": [{}] * 10_000}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * 10_000}]}),
    ],
)
def test_a_long_list_of_wrong_items_is_few_errors(kind: type[BaseModel], body: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps(body))
    assert caught.value.error_count() < 10


async def test_sizes_at_the_limit_are_served(cluster: TestCluster) -> None:
    for prompt, tokens in (("x", 511), ("x" * 511, 1), ("x" * 256, 256)):
        got = await collect(cluster.stub.Generate(generate_request(prompt), timeout=10))
        assert got.finished is not None
        assert got.finished.usage.output_tokens == tokens
    clipped = generate_request("x" * 500, max_tokens=10_000)
    got = await collect(cluster.stub.Generate(clipped, timeout=10))
    assert got.finished is not None and got.finished.usage.output_tokens == 12


USER = {"role": "user", "content": "hi"}
# path, body, param, part of the message
HTTP_CASES: list[tuple[str, Any, str | None, str]] = [
    ("completions", {}, "prompt", "is missing"),
    ("completions", {"prompt": ""}, "prompt", "is empty"),
    ("completions", {"prompt": []}, "prompt", "is empty"),
    ("completions", {"prompt": ["a", ""]}, "prompt[1]", "is empty"),
    ("completions", {"prompt": [[]]}, "prompt", "is empty"),
    ("completions", {"prompt": 5}, "prompt", "must be a text"),
    ("completions", {"prompt": None}, "prompt", "must be a text"),
    ("completions", {"prompt": ["a", 5]}, "prompt", "must be a text"),
    ("completions", {"prompt": [1.5]}, "prompt", "must be a text"),
    ("completions", {"prompt": [-1]}, "prompt", "token id -1"),
    ("completions", {"prompt": [10**30]}, "prompt", "token id 1000"),
    ("completions", {"prompt": "x" * 512}, "prompt", "is 512 tokens long"),
    ("completions", {"prompt": ["a"] * 65}, "prompt", "65 prompts"),
    ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens", "0 is less than 1"),
    ("completions", {"prompt": "a", "max_tokens": "5"}, "max_tokens", "valid integer"),
    ("completions", {"prompt": "a", "max_tokens": 1.5}, "max_tokens", "valid integer"),
    ("completions", {"prompt": "a", "max_tokens": True}, "max_tokens", "valid integer"),
    ("completions", {"prompt": "a", "temperature": "hot"}, "temperature", "valid number"),
    ("completions", {"prompt": "a", "temperature": NAN}, "temperature", "nan"),
    ("completions", {"prompt": "a", "temperature": 3}, "temperature", "3 is not in 0 to 2"),
    ("completions", {"prompt": "a", "top_p": 0}, "top_p", "0 is not"),
    ("completions", {"prompt": "a", "top_k": -1}, "top_k", "-1 is not"),
    ("completions", {"prompt": "a", "seed": 2**64}, "seed", "64 bits"),
    ("completions", {"prompt": "a", "priority": 2**31}, "priority", "32 bits"),
    ("completions", {"prompt": "a", "stop": 5}, "stop", "must be a string"),
    ("completions", {"prompt": "a", "stop": ["x"] * 10_000}, "stop", "10000 stop strings"),
    ("completions", {"prompt": "a", "stop": ""}, "stop", "0 characters"),
    ("completions", {"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids", "token id 999"),
    ("completions", {"prompt": "a", "stream": "yes"}, "stream", "valid boolean"),
    ("completions", {"prompt": "a", "stream_options": {}}, "stream_options", "only allowed"),
    ("completions", {"prompt": "a", "n": 17}, "n", "17 is not in 1 to 16"),
    ("completions", {"prompt": ["a"] * 60, "n": 3}, "n", "3 answers to 60 prompts"),
    ("completions", {"prompt": "a", "n": True}, "n", "valid integer"),
    ("completions", {"prompt": "a", "logprobs": 21}, "logprobs", "not in 0 to 20"),
    ("completions", {"prompt": "a", "logprobs": -1}, "logprobs", "not in 0 to 20"),
    ("completions", {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
    ("completions", {"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias", "not a token id"),
    ("completions", {"prompt": "a", "logit_bias": {"9" * 99: 1}}, "logit_bias", "not a token id"),
    ("completions", {"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias", "token id 999"),
    ("completions", {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias", "not in -100 to 100"),
    ("completions", {"prompt": "a", "presence_penalty": 3}, "presence_penalty", "not in -2 to 2"),
    ("completions", {"prompt": "a", "frequency_penalty": -3}, "frequency_penalty", "-2 to 2"),
    ("completions", {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "over 0"),
    ("completions", {"prompt": "a", "min_p": 1.1}, "min_p", "not in 0 to 1"),
    ("completions", {"prompt": "a", "typical_p": 0}, "typical_p", "over 0"),
    ("completions", {"prompt": "a", "min_tokens": -1}, "min_tokens", "not in 0"),
    ("completions", {"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens", "not in 0"),
    ("completions", {"prompt": "a", "bad_words": ["x"] * 65}, "bad_words", "65 bad words"),
    ("completions", {"prompt": "a", "bad_words": [""]}, "bad_words", "0 characters"),
    ("completions", {"prompt": "a", "cache_salt": "x" * 257}, "cache_salt", "longer than"),
    ("completions", {"prompt": "\ud800"}, None, "not valid JSON"),
    ("completions", [], None, ""),
    ("completions", "text", None, ""),
    ("chat/completions", {}, "messages", "is missing"),
    ("chat/completions", {"messages": []}, "messages", "is empty"),
    ("chat/completions", {"messages": "hi"}, "messages", "must be a list"),
    ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    (
        "chat/completions",
        {"messages": [USER, {"role": "wizard", "content": "x"}]},
        "messages[1].role",
        "none of",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": 5}]},
        "messages[0].content",
        "must be a text or a list",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "only text",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
        "is missing",
    ),
    (
        "chat/completions",
        {"messages": [USER], "max_completion_tokens": 0},
        "max_completion_tokens",
        "less than 1",
    ),
    ("chat/completions", {"messages": [USER], "logprobs": 3}, "logprobs", "boolean"),
    ("chat/completions", {"messages": [USER], "top_logprobs": 3}, "top_logprobs", "when logprobs"),
    (
        "chat/completions",
        {"messages": [USER], "logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        "not in 0 to 20",
    ),
    (
        "chat/completions",
        {"messages": [USER], "response_format": {"type": "xml"}},
        "response_format.type",
        "must be text",
    ),
    (
        "chat/completions",
        {"messages": [USER], "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "is missing",
    ),
    (
        "chat/completions",
        {
            "messages": [USER],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "wizard"}},
            },
        },
        "response_format",
        "wizard",
    ),
    ("completions", {"prompt": "a", "guided_regex": "(("}, "guided_regex", "unclosed"),
    ("completions", {"prompt": "a", "guided_choice": []}, "guided_choice", "no choices"),
    (
        "completions",
        {"prompt": "a", "guided_regex": "a", "guided_json": {}},
        "guided_regex",
        "cannot go with guided_json",
    ),
    (
        "completions",
        {"prompt": "a", "structured_outputs": {"xml": 1}},
        "structured_outputs",
        "must have one of",
    ),
    (
        "completions",
        {"prompt": "a", "structured_outputs": {"choice": [1]}},
        "structured_outputs.choice",
        "must be a list of strings",
    ),
    ("chat/completions", {"messages": [USER], "audio": {"voice": "x"}}, "audio", "not supported"),
]


async def test_http_names_the_field(cluster: TestCluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False) as client:
        for path, body, param, part in HTTP_CASES:
            answer = await client.post(f"/v1/{path}", content=json.dumps(body))
            assert answer.status_code == 400, (body, answer.text)
            error = answer.json()["error"]
            assert error["param"] == param, (body, error)
            assert part in error["message"], (body, error)
            assert error["type"] == "invalid_request_error"
    assert _worked(cluster) == 0
    assert cluster.outcome("invalid_argument") == len(HTTP_CASES)


@pytest.mark.parametrize("content", [b"", b"{", b'{"prompt": "\xff"}', b"\x00", b"null"])
async def test_http_bodies_that_are_no_json(cluster: TestCluster, content: bytes) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False) as client:
        answer = await client.post("/v1/completions", content=content)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_http_bodies_have_a_limit(cluster: TestCluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False, timeout=10) as client:
        answer = await client.post("/v1/completions", content=b"x" * (8 * 1024 * 1024 + 1))
    assert answer.status_code == 400
    assert "larger than 8388608 bytes" in answer.json()["error"]["message"]


async def test_http_codes_that_programs_look_for(cluster: TestCluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False) as client:
        long = await client.post("/v1/completions", json={"prompt": "x" * 600})
        other = await client.post("/v1/completions", json={"prompt": "x", "model": "gpt-9"})
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


async def test_http_asking_for_nothing_special_is_fine(cluster: TestCluster) -> None:
    harmless = {
        "prompt": "a", "max_tokens": 1, "model": None, "n": 1, "best_of": 1, "logprobs": None,
        "echo": False, "suffix": None, "logit_bias": {}, "presence_penalty": 0.0,
        "frequency_penalty": 0, "stop": None, "user": "me", "metadata": {"a": "b"},
        "service_tier": "auto", "store": False, "never_heard_of": [1, 2], "seed": -1,
        "stream": False, "stream_options": None, "temperature": 0, "top_p": 1, "top_k": 0,
    }  # fmt: skip
    chat = {
        "messages": [{"role": "system", "content": "x"}, {"role": "assistant", "content": None}],
        "max_tokens": 1, "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "modalities": ["text"], "reasoning_effort": "low",
        "logprobs": False, "top_logprobs": 0, "parallel_tool_calls": True,
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False) as client:
        for path, body in (("completions", harmless), ("chat/completions", chat)):
            answer = await client.post(f"/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text
    start = cluster.worker(Role.DECODE).starts[0]
    assert start.request.sampling.seed == 2**64 - 1
