"""Answers that are ranked: how clients ask for them, and what is counted."""

from typing import Any

import grpc
import httpx
import pytest

from protos import inference_pb2 as public
from services.runtime.settings import Role
from tests.services.router.conftest import StartRouter
from tests.services.router.fake_worker import ANSWER
from tests.services.router.harness import TestCluster, generate_request


@pytest.fixture
async def cluster(start_router: StartRouter) -> TestCluster:
    return await start_router(decode=1)


async def _post(cluster: TestCluster, path: str, **body: Any) -> Any:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=10, trust_env=False) as client:
        response = await client.post(f"/v1/{path}", json={"max_tokens": 3, **body})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("n", [1, 2])
async def test_all_that_is_written_is_counted(cluster: TestCluster, n: int) -> None:
    answer = await _post(cluster, "completions", prompt="ab", n=n, best_of=4)
    assert [each["index"] for each in answer["choices"]] == list(range(n))
    assert answer["choices"][0]["text"] == ANSWER[:3]
    assert all(each["finish_reason"] == "length" for each in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 3 * 4
    assert answer["usage"]["prompt_tokens"] == 2
    sampling = cluster.worker(Role.DECODE).starts[0].request.sampling
    assert (sampling.n, sampling.best_of) == (n, 4)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("completions", {"prompt": "ab"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
async def test_beams_as_vllm_spells_them(
    cluster: TestCluster, path: str, prompt: dict[str, Any]
) -> None:
    asked = {"use_beam_search": True, "beam_width": 5, "length_penalty": 0.5, "n": 2}
    answer = await _post(cluster, path, early_stopping=True, **asked, **prompt)
    assert len(answer["choices"]) == 2 and answer["usage"]["completion_tokens"] == 3 * 2
    sampling = cluster.worker(Role.DECODE).starts[0].request.sampling
    assert sampling.temperature == 0
    assert sampling.beam_search == public.BeamSearch(
        width=5, length_penalty=0.5, early_stopping=True
    )
    await _post(cluster, path, use_beam_search=True, n=3, **prompt)
    sampling = cluster.worker(Role.DECODE).starts[1].request.sampling
    assert sampling.beam_search == public.BeamSearch(
        width=3, length_penalty=1.0, early_stopping=False
    )


async def test_grpc_hears_of_each_once(cluster: TestCluster) -> None:
    search = public.BeamSearch(width=4)
    request = generate_request("ab", max_tokens=3, n=2, beam_search=search)
    responses = [each async for each in cluster.stub.Generate(request, timeout=10)]
    ends = [each.choice_finished.index for each in responses if each.HasField("choice_finished")]
    assert ends == [0, 1]
    assert responses[-1].finished.usage.output_tokens == 6


BEAMS = {"beam_search": public.BeamSearch(width=2)}


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"best_of": 17}, "best_of: 17 is not in n = 1 to 16"),
        ({"n": 3, "best_of": 2}, "best_of: 2 is not in n = 3 to 16"),
        ({"best_of": 2**32 - 1}, "best_of: "),
        ({"beam_search": public.BeamSearch()}, "beam_search.width: 0 is not in 2 to 16"),
        ({"beam_search": public.BeamSearch(width=17)}, "beam_search.width: 17"),
        ({"n": 3} | BEAMS, "beam_search.width: 2 is not in 3 to 16"),
        (
            {"beam_search": public.BeamSearch(width=2, length_penalty=float("nan"))},
            "beam_search.length_penalty: nan",
        ),
        ({"stop": ["x"]} | BEAMS, "stop: cannot go"),
        ({"logprobs": 0} | BEAMS, "logprobs: cannot go"),
        ({"prompt_logprobs": 0} | BEAMS, "prompt_logprobs: cannot go"),
        ({"temperature": 0.5} | BEAMS, "temperature: cannot go"),
        ({"guided": public.GuidedDecoding(json_object=True)} | BEAMS, "guided: cannot go"),
    ],
)
async def test_grpc_names_what_is_wrong(
    cluster: TestCluster, sampling: dict[str, Any], told: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in cluster.stub.Generate(generate_request("ab", **sampling), timeout=5):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(f"sampling.{told}")


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("body", "field", "reason"),
    [
        ({"prompt": "a", "best_of": 17}, "best_of", "17 is not in n = 1 to 16"),
        ({"prompt": ["a"] * 60, "best_of": 3}, "best_of", "3 answers to 60 prompts"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of", "be streamed"),
        (CHAT | {"best_of": 2}, "best_of", "not supported"),
        ({"prompt": "a", "beam_width": 2}, "beam_width", "use_beam_search"),
        ({"prompt": "a", "length_penalty": 2}, "length_penalty", "use_beam_search"),
        ({"prompt": "a", "use_beam_search": True}, "beam_width", "1 is not in 2"),
        (CHAT | {"use_beam_search": True, "stream": True}, "stream", "cannot go with a beam"),
        (
            {"prompt": "a", "use_beam_search": True, "n": 2, "length_penalty": 11},
            "length_penalty",
            "11 is not in -10 to 10",
        ),
    ],
)
async def test_http_names_what_is_wrong(
    cluster: TestCluster, body: dict[str, Any], field: str, reason: str
) -> None:
    path = "chat/completions" if "messages" in body else "completions"
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False) as client:
        response = await client.post(f"/v1/{path}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert reason in error["message"]
