"""The HTTP face, with the official client and with plain HTTP."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from protos import inference_pb2 as public
from services.runtime.settings import Role
from tests.services.router.conftest import StartRouter, byte_model
from tests.services.router.fake_worker import ANSWER, FakeWorker, Script
from tests.services.router.harness import TestCluster, eventually, generate_request

LONG = "x" * 20
USER = [{"role": "user", "content": LONG}]


@contextlib.asynccontextmanager
async def _client(cluster: TestCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=10
    ) as client:
        yield client


@contextlib.asynccontextmanager
async def _http(cluster: TestCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=10, trust_env=False) as client:
        yield client


async def test_models(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1)
    async with _client(cluster) as client:
        assert [each.id async for each in client.models.list()] == ["bytes", "demo"]
        assert (await client.models.retrieve("demo")).owned_by == "kvrelay"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("gpt-9/x")
    assert caught.value.code == "model_not_found"


async def test_a_whole_completion(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, decode=1)
    async with _client(cluster) as client:
        answer = await client.completions.create(model="demo", prompt=LONG)
    assert answer.choices[0].text == ANSWER[:16]  # OpenAI's default
    assert answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model) == ("text_completion", "demo")
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (20, 16)
    assert answer.usage.total_tokens == 36
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert cluster.worker(Role.PREFILL).starts


async def test_a_streamed_completion(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, decode=1)
    async with _client(cluster) as client:
        stream = await client.completions.create(
            model="bytes",
            prompt=[1, 2, 3],
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == ANSWER[:4]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 4 + ["length"]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * 5
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 7
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_whole_chat(start_router: StartRouter) -> None:
    def part(text: str) -> Any:
        return {"type": "text", "text": text}

    cluster = await start_router(prefill=1, decode=1, script=Script(stop_at=5))
    async with _client(cluster) as client:
        answer = await client.chat.completions.create(
            model="bytes",
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [part("a"), part("b")]},
            ],
            max_completion_tokens=9,
        )
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER[:5])
    assert (choice.finish_reason, answer.object) == ("stop", "chat.completion")
    prompt = bytes(cluster.worker(Role.DECODE).starts[0].request.prompt_token_ids)
    assert prompt == b"system: be brief\nuser: ab\nassistant:"
    assert cluster.worker(Role.DECODE).starts[0].request.sampling.max_tokens == 9


async def test_a_streamed_chat(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, decode=1)
    async with _client(cluster) as client:
        stream = await client.chat.completions.create(
            model="bytes", messages=USER, max_tokens=4, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER[:4]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


async def test_extensions_reach_the_instance_and_token_ids_come_back(
    start_router: StartRouter,
) -> None:
    cluster = await start_router(decode=1)
    extra = {
        "ignore_eos": True,
        "top_k": 5,
        "stop_token_ids": [7],
        "skip_special_tokens": False,
        "return_token_ids": True,
        "priority": -3,
    }
    async with _client(cluster) as client:
        whole = await client.completions.create(
            model="bytes", prompt="ab", max_tokens=2, stop=["q"], seed=5, extra_body=extra
        )
        chat = await client.chat.completions.create(
            model="bytes", messages=USER, max_tokens=2, extra_body=extra
        )
        stream = await client.completions.create(
            model="bytes", prompt="ab", max_tokens=2, stream=True, extra_body=extra
        )
        parts = [chunk.choices[0].model_dump() async for chunk in stream]
        stream = await client.chat.completions.create(
            model="bytes", messages=USER, max_tokens=2, stream=True, extra_body=extra
        )
        chunks = [chunk.model_dump() async for chunk in stream]
    request = cluster.worker(Role.DECODE).starts[0].request
    sampling = request.sampling
    assert (sampling.ignore_eos, sampling.top_k, sampling.seed) == (True, 5, 5)
    assert (list(sampling.stop_token_ids), list(sampling.stop)) == ([7], ["q"])
    assert sampling.skip_special_tokens is False
    assert request.priority == -3
    ids = [ord(letter) for letter in ANSWER[:2]]
    assert whole.choices[0].model_dump()["token_ids"] == ids
    assert whole.choices[0].model_dump()["prompt_token_ids"] == list(b"ab")
    assert chat.choices[0].model_dump()["token_ids"] == ids
    assert bytes(chat.model_dump()["prompt_token_ids"]) == f"user: {LONG}\nassistant:".encode()
    assert parts[0]["prompt_token_ids"] == list(b"ab")
    assert [each for part in parts for each in part.get("token_ids", [])] == ids
    assert chunks[0]["prompt_token_ids"] == chat.model_dump()["prompt_token_ids"]
    assert [e for chunk in chunks for e in chunk["choices"][0].get("token_ids", [])] == ids


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_several_choices(start_router: StartRouter, stream: bool) -> None:
    cluster = await start_router(prefill=1, decode=2)
    prompts: list[Any] = [[1, 2], [3, 4, 5]]
    async with _client(cluster) as client:
        if stream:
            texts = ["", ""]
            chunks = await client.completions.create(
                model="bytes", prompt=prompts, max_tokens=3, stream=True
            )
            async for chunk in chunks:
                texts[chunk.choices[0].index] += chunk.choices[0].text
        else:
            whole = await client.completions.create(model="bytes", prompt=prompts, max_tokens=3)
            assert [choice.index for choice in whole.choices] == [0, 1]
            texts = [choice.text for choice in whole.choices]
            assert whole.usage is not None
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 6)
    assert texts == [ANSWER[:3], ANSWER[:3]]


@pytest.mark.parametrize("num_prompts", [1, 2])
async def test_several_answers_are_several_choices(
    start_router: StartRouter, num_prompts: int
) -> None:
    cluster = await start_router(prefill=1, decode=2)
    prompts: list[Any] = [LONG, "abc"][:num_prompts]
    wanted = [ANSWER[i : i + 3] for i in (0, 1)] * num_prompts
    async with _client(cluster) as client:
        whole = await client.completions.create(model="bytes", prompt=prompts, max_tokens=3, n=2)
        assert [(each.index, each.text) for each in whole.choices] == list(enumerate(wanted))
        assert {each.finish_reason for each in whole.choices} == {"length"}
        num_prompt_tokens = 20 if num_prompts == 1 else 23
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == num_prompt_tokens
        assert whole.usage.completion_tokens == 6 * num_prompts
        chunks = await client.completions.create(
            model="bytes",
            prompt=prompts,
            max_tokens=3,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        told = [chunk async for chunk in chunks]
    texts, ends = [""] * len(wanted), [""] * len(wanted)
    for chunk in told[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
        ends[chunk.choices[0].index] += chunk.choices[0].finish_reason or ""
    assert (texts, set(ends)) == (wanted, {"length"})
    assert told[-1].usage == whole.usage
    decode_starts = [start for w in cluster.workers for start in w.starts if w.role is Role.DECODE]
    assert [start.request.sampling.n for start in decode_starts] == [2] * 2 * num_prompts


async def test_an_abort_ends_every_answer_with_its_reason(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1, script=Script(stall_after=2))
    async with _client(cluster) as client:
        stream = await client.chat.completions.create(
            model="bytes", messages=USER, max_tokens=9, n=2, stream=True
        )
        ends: dict[int, str] = {}
        num_chunks = 0
        async for chunk in stream:
            num_chunks += 1
            if chunk.choices[0].finish_reason:
                ends[chunk.choices[0].index] = chunk.choices[0].finish_reason
            if num_chunks == 6:
                request_id = chunk.id.removeprefix("chatcmpl-")
                await cluster.stub.Abort(public.AbortRequest(request_id=request_id))
    assert ends == {0: "abort", 1: "abort"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
async def test_a_client_that_disconnects_stops_its_requests(
    start_router: StartRouter, stream: bool, prompts: int
) -> None:
    cluster = await start_router(prefill=1, decode=1, script=Script(stall_after=2))
    body = {"prompt": [LONG] * prompts, "max_tokens": 9, "stream": stream}
    decode = cluster.worker(Role.DECODE)
    async with _http(cluster) as client:
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: len(decode.running) == prompts)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await eventually(lambda: not decode.running, within_s=0.5)
    assert sorted(decode.aborts) == sorted(start.request.request_id for start in decode.starts)
    await eventually(lambda: cluster.outcome("abort") == prompts)


async def test_an_abort_by_id_ends_a_stream_with_its_reason(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1, script=Script(stall_after=2))
    async with _client(cluster) as client:
        stream = await client.chat.completions.create(
            model="bytes", messages=USER, max_tokens=9, stream=True
        )
        reasons = []
        async for chunk in stream:
            reasons.append(chunk.choices[0].finish_reason)
            if len(reasons) == 3:
                request_id = chunk.id.removeprefix("chatcmpl-")
                await cluster.stub.Abort(public.AbortRequest(request_id=request_id))
    assert reasons == [None, None, None, "abort"]


async def test_a_failure_in_a_stream_is_its_last_event(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1, script=Script(fail_after=2))
    async with _client(cluster) as client:
        stream = await client.completions.create(
            model="bytes", prompt="ab", max_tokens=9, stream=True
        )
        text = ""
        with pytest.raises(openai.APIError, match="no room here"):
            async for chunk in stream:
                text += chunk.choices[0].text
    assert text == ANSWER[:2]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failing_prompt_of_several_ends_all(
    start_router: StartRouter, stream: bool
) -> None:
    cluster = await start_router(decode=1, script=Script(fail_after=1, step_s=0.01))
    async with _http(cluster) as client:
        body = {"prompt": ["a", "b"], "max_tokens": 5, "stream": stream}
        answer = await client.post("/v1/completions", json=body)
    if stream:
        events = [line for line in answer.text.splitlines() if line]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "no room here"
    else:
        assert answer.status_code == 429
    await eventually(lambda: not cluster.worker(Role.DECODE).running)


async def test_too_many_at_once_are_refused_with_a_hint(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1, script=Script(stall_after=1), max_requests=2)
    running = [cluster.stub.Generate(generate_request(max_tokens=9)) for _ in range(1)]
    await eventually(lambda: len(cluster.worker(Role.DECODE).starts) == 1)
    async with _client(cluster) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="bytes", prompt=["a", "b"])
    assert int(caught.value.response.headers["retry-after"]) >= 1
    for call in running:
        call.cancel()


async def test_request_ids_are_echoed_or_made(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1)
    body = {"prompt": "a", "max_tokens": 1}
    async with _http(cluster) as client:
        for given, usable in (("mine-7", True), ("x" * 200, False), (None, False)):
            headers = {"x-request-id": given} if given else {}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert (answer.headers["x-request-id"] == given) is usable
            assert answer.headers["x-request-id"]
        bad = await client.post("/v1/completions", json={}, headers={"x-request-id": "mine-8"})
    assert (bad.status_code, bad.headers["x-request-id"]) == (400, "mine-8")


async def test_health_and_readiness(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1)
    async with _http(cluster) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        answer = await client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "starting" in answer.json()["error"]["message"]
        decode = await cluster.add(FakeWorker(Role.DECODE))
        assert (await client.get("/ready")).status_code == 200
        decode.load.draining = True
        await cluster.wait_state(decode, "draining")
        assert (await client.get("/ready")).status_code == 503


async def test_metrics(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, decode=1)
    async with _http(cluster) as client:
        await client.post("/v1/completions", json={"prompt": LONG, "max_tokens": 3})
        await client.post("/v1/completions", json={"prompt": ""})
        text = (await client.get("/metrics")).text
    for line in (
        "kvrelay_time_to_first_token_seconds_count{",
        "kvrelay_e2e_request_latency_seconds_count{",
        "kvrelay_request_queue_time_seconds_count{",
        "kvrelay_prefill_time_seconds_count{",
    ):
        assert next(each for each in text.splitlines() if each.startswith(line)).endswith(" 1.0")
    assert 'outcome="length",role="router"} 1.0' in text
    assert 'outcome="invalid_argument",role="router"} 1.0' in text
    gaps = [x for x in text.splitlines() if "inter_token_latency_seconds_count" in x]
    assert gaps[0].endswith(" 2.0")
    assert 'state="ready"} 2.0' in text
    running = [x for x in text.splitlines() if x.startswith("kvrelay_requests_running{")]
    assert running[0].endswith(" 0.0")


@pytest.mark.parametrize("version", ["abc", "", "1.x", "1..0"])
async def test_metrics_for_readers_with_odd_wishes(start_router: StartRouter, version: str) -> None:
    cluster = await start_router()
    accept = {"accept": f"application/openmetrics-text; version={version}"}
    async with _http(cluster) as client:
        answer = await client.get("/metrics", headers=accept)
    assert answer.status_code == 200
    assert "kvrelay_requests_running" in answer.text


async def test_unknown_routes_and_methods_answer_in_openais_form(start_router: StartRouter) -> None:
    cluster = await start_router()
    async with _http(cluster) as client:
        missing = await client.get("/v2/nothing")
        wrong = await client.get("/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    for answer in (missing, wrong):
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_chat_without_a_template_is_refused(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1, model=byte_model(chat_template=None))
    async with _client(cluster) as client:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            await client.chat.completions.create(model="bytes", messages=USER)
