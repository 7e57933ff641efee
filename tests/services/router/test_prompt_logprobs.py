"""What a client hears of its prompt: logprobs and echo, whole and streamed, on both faces."""

import json
from typing import Any

import httpx
import pytest

from engine.request import SamplingParams
from services.router.sampling import MAX_PROMPT_LOGPROBS, check_prompt_logprobs
from services.runtime.errors import InvalidArgument
from tests.services.router.conftest import StartRouter
from tests.services.router.fake_worker import ANSWER
from tests.services.router.harness import TestCluster, generate_request

PROMPT = "prompt"
MESSAGES = [{"role": "user", "content": "x"}]
TOLD = [None] + [
    {
        "48": {"logprob": -1.0, "rank": 1, "decoded_token": "0"},
        str(ord(letter)): {"logprob": -1.5, "rank": 2, "decoded_token": letter},
    }
    for letter in PROMPT[1:]
]


@pytest.fixture
async def cluster(start_router: StartRouter) -> TestCluster:
    return await start_router(decode=1)


async def _post(cluster: TestCluster, path: str, **body: Any) -> Any:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=10, trust_env=False) as client:
        response = await client.post(f"/v1/{path}", json={"max_tokens": 3, **body})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    events = [e.removeprefix("data: ") for e in response.text.split("\n\n") if e]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


async def test_grpc_tells_every_prompt_token_once(cluster: TestCluster) -> None:
    request = generate_request(PROMPT, max_tokens=3, prompt_logprobs=2)
    responses = [each async for each in cluster.stub.Generate(request, timeout=10)]
    told = [record for each in responses for record in each.tokens.prompt_logprobs]
    assert [record.token.token_id for record in told] == list(PROMPT.encode())
    assert [len(record.top) for record in told] == [0] + [2] * 5


async def test_a_completion_echoes_its_prompt(cluster: TestCluster) -> None:
    for prompt in (PROMPT, list(PROMPT.encode())):
        [choice] = (await _post(cluster, "completions", prompt=prompt, echo=True))["choices"]
        assert choice["text"] == PROMPT + ANSWER[:3]
        assert choice["logprobs"] is None and "prompt_logprobs" not in choice


async def test_an_echo_is_told_like_the_answer(cluster: TestCluster) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1}
    [choice] = (await _post(cluster, "completions", **body))["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"] == PROMPT + ANSWER[:3]
    assert told["token_logprobs"] == [None] + [-1.5] * 8
    assert told["text_offset"] == list(range(9))
    assert told["top_logprobs"][0] is None
    assert told["top_logprobs"][1] == {"0": -1.0, PROMPT[1]: -1.5}

    parts = [e["choices"][0] for e in await _post(cluster, "completions", stream=True, **body)]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name, whole in told.items():
        assert [x for p in parts if p["logprobs"] for x in p["logprobs"][name]] == whole


@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers_echo_alike(cluster: TestCluster, stream: bool) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "n": 3, "stream": stream}
    answer = await _post(cluster, "completions", **body)
    parts = [p for e in (answer if stream else [answer]) for p in e["choices"]]
    for index in range(3):
        mine = [part for part in parts if part["index"] == index]
        text = "".join(part["text"] for part in mine)
        told = [token for part in mine if part["logprobs"] for token in part["logprobs"]["tokens"]]
        assert text == "".join(told) and text.startswith(PROMPT)
        assert len(told) == len(PROMPT) + 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_can_be_scored_without_an_answer(cluster: TestCluster, stream: bool) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    answer = await _post(cluster, "completions", **body, return_token_ids=True)
    parts = [p for e in (answer if stream else [answer]) for p in e["choices"]]
    assert "".join(part["text"] for part in parts) == PROMPT
    told = [x for part in parts if part["logprobs"] for x in part["logprobs"]["token_logprobs"]]
    assert told == [None] + [-1.5] * 5
    assert not any(part.get("token_ids") for part in parts)
    assert parts[-1]["finish_reason"] == "length"
    if not stream:
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)


async def test_each_number_is_the_one_that_was_asked_for(cluster: TestCluster) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 3, "prompt_logprobs": 1}
    [choice] = (await _post(cluster, "completions", **body))["choices"]
    assert choice["prompt_logprobs"] == TOLD
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [4] * 8


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_logprobs_as_vllm_spells_them(cluster: TestCluster, stream: bool) -> None:
    body = {"prompt": PROMPT, "prompt_logprobs": 1, "stream": stream}
    answer = await _post(cluster, "completions", **body)
    parts = [e["choices"][0] for e in answer] if stream else answer["choices"]
    assert [p["prompt_logprobs"] for p in parts if "prompt_logprobs" in p] == [TOLD]
    assert "".join(part["text"] for part in parts) == ANSWER[:3]

    chat = {"messages": MESSAGES, "prompt_logprobs": 0, "stream": stream}
    answer = await _post(cluster, "chat/completions", **chat)
    found = [
        e["prompt_logprobs"] for e in (answer if stream else [answer]) if "prompt_logprobs" in e
    ]
    assert len(found) == 1 and found[0][0] is None
    assert all(len(entry) == 1 for entry in found[0][1:])


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": "a", "echo": 1}, "echo"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "echo": True, "n": 2, "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "allowed_token_ids": [5]}, "allowed_token_ids"),
        ("completions", {"prompt": "a", "echo": True, "logprobs": 21}, "logprobs"),
        ("completions", {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("chat/completions", {"messages": MESSAGES, "prompt_logprobs": 21}, "prompt_logprobs"),
        ("chat/completions", {"messages": MESSAGES, "echo": True}, "echo"),
    ],
)
async def test_bad_values_are_named(cluster: TestCluster, path: str, body: Any, field: str) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=10, trust_env=False) as client:
        response = await client.post(f"/v1/{path}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_what_would_not_fit_a_message_is_refused() -> None:
    sampling = SamplingParams(prompt_logprobs=1)
    check_prompt_logprobs(sampling, MAX_PROMPT_LOGPROBS // 2, "prompt_logprobs")
    with pytest.raises(InvalidArgument, match=f"{MAX_PROMPT_LOGPROBS} are allowed") as caught:
        check_prompt_logprobs(sampling, MAX_PROMPT_LOGPROBS // 2 + 1, "prompt_logprobs")
    assert caught.value.field == "prompt_logprobs"
    check_prompt_logprobs(SamplingParams(), 1 << 20, "prompt_logprobs")
