"""A real cluster answers: through handoffs, exactly, with one terminal event each."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from protos import inference_pb2 as public
from tests.e2e.harness import Cluster, collect, eventually, request, serve

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 64, 200, 700]


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}-{seed}").choices(range(250), k=length)


@pytest.fixture(scope="module")
def colocated_answers(tiny_model: Path) -> dict[int, list[int]]:
    """What one colocated instance answers, alone and undisturbed."""
    with serve(str(tiny_model), "--colocated", "1", "--dtype", "float32") as cluster:
        return {
            n: cluster.generate(ids=prompt_ids(n), max_tokens=24, ignore_eos=True).token_ids
            for n in LENGTHS
        }


@pytest.mark.parametrize("length", LENGTHS)
def test_disaggregated_equals_colocated(
    cluster: Cluster, colocated_answers: dict[int, list[int]], length: int
) -> None:
    answer = cluster.generate(ids=prompt_ids(length), max_tokens=24, ignore_eos=True)
    assert answer.finished is not None
    assert answer.finished.timeline.prefill_instance
    assert answer.finished.timeline.handoff_bytes > 0
    assert answer.token_ids == colocated_answers[length]
    assert answer.finished.usage.output_tokens == 24
    assert answer.finished.usage.prompt_tokens == length


def test_many_at_once_equal_one_alone(
    cluster: Cluster, colocated_answers: dict[int, list[int]]
) -> None:
    """Also a second time, when prefixes are cached on both sides."""
    for _ in range(2):
        with ThreadPoolExecutor(len(LENGTHS)) as pool:
            answers = pool.map(
                lambda n: cluster.generate(ids=prompt_ids(n), max_tokens=24, ignore_eos=True),
                LENGTHS,
            )
            for length, answer in zip(LENGTHS, answers, strict=True):
                assert answer.token_ids == colocated_answers[length]


def test_prefix_hit_saves_compute_and_bytes(cluster: Cluster) -> None:
    ids = prompt_ids(320, seed=5)
    first = cluster.generate(ids=ids, max_tokens=2, ignore_eos=True).finished
    again = cluster.generate(ids=ids, max_tokens=2, ignore_eos=True).finished
    assert first is not None and again is not None
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens >= 304
    assert again.timeline.handoff_bytes <= first.timeline.handoff_bytes / 10


def test_one_token_needs_no_decode_leg(cluster: Cluster) -> None:
    """PAINS 13: exactly one token, no handoff, nothing left reserved."""
    answer = cluster.generate(ids=prompt_ids(100), max_tokens=1, ignore_eos=True)
    assert answer.finished is not None
    assert len(answer.token_ids) == answer.finished.usage.output_tokens == 1
    assert answer.finished.finish_reason == public.FINISH_REASON_LENGTH
    assert not answer.finished.timeline.prefill_instance
    eventually(cluster.held_nothing, 2, "nothing held")


def test_first_token_is_emitted_and_counted_once(cluster: Cluster) -> None:
    """PAINS 16: prefixes of a longer greedy answer, token by token."""
    whole = cluster.generate(ids=prompt_ids(40), max_tokens=8, ignore_eos=True).token_ids
    for n in range(2, 8):
        answer = cluster.generate(ids=prompt_ids(40), max_tokens=n, ignore_eos=True)
        assert answer.finished is not None
        assert answer.token_ids == whole[:n]
        assert answer.finished.usage.output_tokens == n


def test_stop_token_on_the_first_token_ends_the_answer(cluster: Cluster) -> None:
    """The decode instance applies stops to the first token, too, and cancels the handoff."""
    first = cluster.generate(ids=prompt_ids(60), max_tokens=2, ignore_eos=True).token_ids[0]
    answer = cluster.generate(ids=prompt_ids(60), max_tokens=50, stop_token_ids=[first])
    assert answer.finished is not None
    assert answer.token_ids == []
    assert answer.finished.finish_reason == public.FINISH_REASON_STOP
    assert answer.finished.stop_reason == str(first)
    eventually(cluster.held_nothing, 2, "nothing held")


def test_stop_string_spans_tokens(cluster: Cluster) -> None:
    answer = cluster.generate(ids=prompt_ids(48), max_tokens=60, ignore_eos=True)
    stop = answer.text[5:8]
    assert len(stop) == 3
    cut = cluster.generate(ids=prompt_ids(48), max_tokens=60, ignore_eos=True, stop=[stop])
    assert cut.finished is not None
    assert cut.text == answer.text[: answer.text.index(stop)]
    assert cut.finished.stop_reason == stop


def test_seeded_sampling_repeats(cluster: Cluster) -> None:
    draws = [
        cluster.generate(
            ids=prompt_ids(30), max_tokens=20, ignore_eos=True, temperature=1.0, seed=seed
        ).token_ids
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_client_ids_may_collide(cluster: Cluster) -> None:
    """PAINS 12: the client's id is echoed and is nobody's identity."""

    def ask(n: int) -> list[int]:
        message = request(ids=prompt_ids(n), max_tokens=16, ignore_eos=True)
        message.client_request_id = "same 🦊 id"
        with cluster.client() as stub:
            stream = stub.Generate(message, timeout=30)
            first = next(stream)
            assert first.client_request_id == "same 🦊 id"
            assert first.request_id != first.client_request_id
            return collect(stream).token_ids

    alone = [ask(n) for n in (10, 20, 30, 40)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, (10, 20, 30, 40))) == alone


def test_deadline_already_past(cluster: Cluster) -> None:
    with cluster.client() as stub, pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request(ids=prompt_ids(100), max_tokens=500), timeout=0.001))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(cluster.held_nothing, 2, "nothing held")
