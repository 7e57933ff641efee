"""Sampling on real clusters: the same on one instance and across a handoff.

That this holds for every parameter, preempted, too, is ``tests/services/worker/test_matrix.py``.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from protos import inference_pb2 as public
from tests.e2e.harness import Cluster, eventually, request, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
EXACT = ("--dtype", "float32", "--weights", "float32")
WAYS: dict[str, dict[str, Any]] = {
    "drawn": {
        "temperature": 1.2,
        "seed": 4,
        "min_p": 0.02,
        "top_k": 40,
        "typical_p": 0.9,
        "repetition_penalty": 1.3,
        "logit_bias": {260: -100.0, 28: 2.0},
    },
    "best_of": {"temperature": 0.9, "seed": 3, "n": 2, "best_of": 4},
    "beams": {"n": 2, "beam_search": public.BeamSearch(width=4), "max_tokens": 20},
    "min_tokens": {"min_tokens": 12, "stop": [" the", "."], "bad_words": ["dog", "fox"]},
    "included": {"stop": [" the", "."], "include_stop": True},
    "told": {"temperature": 0.7, "seed": 5, "logprobs": 3},
    "prompt": {"prompt_logprobs": 2},
    "one": {"max_tokens": 1, "logprobs": 2},
}


@pytest.fixture(scope="module")
def disaggregated() -> Iterator[Cluster]:
    with serve("demo", "--disaggregate-from", "0", *EXACT) as running:
        yield running
        eventually(running.held_nothing, 3, "everything free")


@pytest.fixture(scope="module")
def colocated() -> Iterator[Cluster]:
    with serve("demo", "--colocated", "1", *EXACT) as running:
        yield running


def ask(cluster: Cluster, way: dict[str, Any]) -> tuple[list[public.Tokens], public.Finished]:
    with cluster.client() as stub:
        message = request(prompt=PROMPT, **{"max_tokens": 32, "ignore_eos": True, **way})
        responses = list(stub.Generate(message, timeout=50))
    return [r.tokens for r in responses if r.HasField("tokens")], responses[-1].finished


@pytest.mark.parametrize("name", WAYS)
def test_a_handoff_changes_nothing(disaggregated: Cluster, colocated: Cluster, name: str) -> None:
    """PAINS 13, 15, 16 and 17."""
    ways = [ask(cluster, WAYS[name]) for cluster in (disaggregated, colocated)]
    (moved, end), (stayed, expected) = ways
    assert end.timeline.prefill_instance or name == "one"
    assert not expected.timeline.prefill_instance
    assert [list(t.token_ids) for t in moved] == [list(t.token_ids) for t in stayed]
    assert "".join(t.text for t in moved) == "".join(t.text for t in stayed)
    assert (end.finish_reason, end.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert end.usage.output_tokens == expected.usage.output_tokens
    ours = [record for t in moved for record in (*t.prompt_logprobs, *t.logprobs)]
    theirs = [record for t in stayed for record in (*t.prompt_logprobs, *t.logprobs)]
    assert len(ours) == len(theirs)
    if "logprobs" in WAYS[name]:
        assert len(ours) == end.usage.output_tokens
    if "prompt_logprobs" in WAYS[name]:
        assert len(ours) == end.usage.prompt_tokens
    for mine, other in zip(ours, theirs, strict=True):
        assert [t.token_id for t in mine.top] == [t.token_id for t in other.top]
        assert mine.token.rank == other.token.rank
        assert mine.token.logprob == pytest.approx(other.token.logprob, abs=1e-4)


def test_they_do_what_they_say(disaggregated: Cluster) -> None:
    def text(name: str) -> str:
        return "".join(tokens.text for tokens in ask(disaggregated, WAYS[name])[0])

    assert "dog" not in text("min_tokens") and "fox" not in text("min_tokens")
    assert text("included").endswith((" the", "."))
    _, end = ask(disaggregated, WAYS["min_tokens"])
    assert end.usage.output_tokens >= 12
    [one], end = ask(disaggregated, WAYS["one"])
    assert end.usage.output_tokens == len(one.logprobs) == 1


def test_openai_logprobs(disaggregated: Cluster) -> None:
    client = OpenAI(base_url=f"{disaggregated.url}/v1", api_key="none", max_retries=0)
    whole = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2
    )
    told = whole.choices[0].logprobs
    assert told is not None and told.tokens is not None and told.token_logprobs is not None
    assert "".join(told.tokens) == whole.choices[0].text
    assert told.text_offset == [sum(map(len, told.tokens[:i])) for i in range(5)]
    assert told.top_logprobs is not None and all(len(top) == 2 for top in told.top_logprobs)

    parts = list(
        client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2, stream=True
        )
    )
    streamed = [p.choices[0].logprobs for p in parts if p.choices and p.choices[0].logprobs]
    assert [t for each in streamed for t in each.tokens or []] == told.tokens
    assert [o for each in streamed for o in each.text_offset or []] == told.text_offset

    chat = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    content = chat.choices[0].logprobs
    assert content is not None and content.content is not None and len(content.content) == 4
    assert all(len(each.top_logprobs) == 3 for each in content.content)
    spelled = b"".join(bytes(each.bytes or []) for each in content.content)
    assert spelled.decode() == chat.choices[0].message.content


def test_openai_echo(disaggregated: Cluster) -> None:
    """As harnesses that score texts ask for it."""
    client = OpenAI(base_url=f"{disaggregated.url}/v1", api_key="none", max_retries=0)
    whole = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=2, temperature=0, logprobs=1, echo=True
    )
    told = whole.choices[0].logprobs
    assert whole.choices[0].text.startswith(PROMPT)
    assert told is not None and told.tokens is not None and told.token_logprobs is not None
    assert "".join(told.tokens) == whole.choices[0].text
    assert told.token_logprobs[0] is None
    # The second "quick brown fox" has been seen before.
    assert told.token_logprobs[-3] is not None and told.token_logprobs[-3] > -2
