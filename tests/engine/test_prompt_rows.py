"""Logprobs of prompts: against transformers, in chunks, past the prefix cache, preempted."""

from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.loaders.open import open_model
from engine.models.interface import MOST_ROWS
from engine.plan import Sampled
from engine.request import Purpose, Request, SamplingParams, TokenLogprobs
from engine.runner import Runner
from tests.engine.models.tiny_llama import SHAPES, oracle_logits, random_llama, write_directory
from tests.engine.runner_bench import Bench

SHAPE = SHAPES[1]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=3)
PROMPT = tuple((7 * i) % 250 for i in range(2 * MOST_ROWS + 9))


@pytest.fixture(scope="module")
def model():
    return random_llama(SHAPE)


@pytest.fixture(scope="module", params=["auto", "torch"])
def runner(request, model, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    files = open_model(str(write_directory(model, tmp_path_factory.mktemp("model") / "tiny")))
    config = EngineConfig(
        dtype="float32", block_size=16, kv_cache_bytes=1 << 20, kernels=request.param
    )
    return Runner(config, files)


def told(sampled: list[Sampled]) -> tuple[TokenLogprobs, ...]:
    """They come with the first token, and never again."""
    assert not any(each.prompt_logprobs for each in sampled[1:])
    return sampled[0].prompt_logprobs


def check(records: tuple[TokenLogprobs, ...], model, prompt: tuple[int, ...]) -> None:
    expected = oracle_logits(model, list(prompt)).double().log_softmax(-1)
    assert [record.token_id for record in records] == list(prompt[1:])
    for record, row in zip(records, expected, strict=False):
        assert record.logprob == pytest.approx(float(row[record.token_id]), abs=1e-4)
        assert record.rank == int((row > row[record.token_id]).sum()) + 1
        values, ids = row.topk(3)
        assert [token_id for token_id, _ in record.top] == ids.tolist()
        torch.testing.assert_close(
            torch.tensor([value for _, value in record.top], dtype=torch.float64),
            values,
            atol=1e-4,
            rtol=0,
        )


@pytest.mark.parametrize("limit", [1000, 32, 16])
@pytest.mark.parametrize("length", [1, 2, 16, len(PROMPT)])
def test_they_are_transformers(runner: Runner, model, length: int, limit: int) -> None:
    prompt = PROMPT[:length]
    plain = Request("plain", PROMPT[::-1], replace(SAMPLING, prompt_logprobs=None))
    sampled = Bench(runner).run(Request("r", prompt, SAMPLING), plain, limit=limit)
    check(told(sampled["r"]), model, prompt)
    assert not told(sampled["plain"])


def test_a_cached_prompt_is_computed_again(runner: Runner, model) -> None:
    bench = Bench(runner)
    without = replace(SAMPLING, prompt_logprobs=None)
    bench.run(Request("first", PROMPT, without))
    assert bench.kv.num_hit_tokens == 0
    sampled = bench.run(Request("told", PROMPT, SAMPLING))
    assert bench.kv.num_hit_tokens == 0
    check(told(sampled["told"]), model, PROMPT)
    sampled = bench.run(Request("last", PROMPT, without))
    assert bench.kv.num_hit_tokens == len(PROMPT) // 16 * 16
    tokens = {tuple(each.token_id for each in every) for every in sampled.values()}
    assert len(tokens) == 1


def test_an_earlier_attempt_has_told_them(runner: Runner) -> None:
    sampled = Bench(runner).run(Request("r", PROMPT, SAMPLING, output_token_ids=(5,)))
    assert not told(sampled["r"])


def test_a_preempted_answer_tells_them_once(runner: Runner, model) -> None:
    sampling = replace(SAMPLING, max_tokens=60)
    requests = [Request(f"r{i}", (i, *PROMPT[1:40]), sampling) for i in range(3)]
    bench = Bench(runner, num_blocks=13)
    sampled = bench.run(*requests, limit=16)
    assert bench.scheduler.stats().num_preemptions > 0
    for request in requests:
        check(told(sampled[request.request_id]), model, request.prompt_token_ids)
        alone = Bench(runner).run(request)[request.request_id]
        assert [e.token_id for e in sampled[request.request_id]] == [e.token_id for e in alone]


def test_a_source_tells_them_with_the_token_it_hands_over(runner: Runner, model) -> None:
    bench = Bench(runner)
    bench.run(Request("before", PROMPT, replace(SAMPLING, prompt_logprobs=None)))
    bench.add(Request("s", PROMPT, SAMPLING), purpose=Purpose.SOURCE)
    while "s" not in bench.sampled:
        bench.step(32)
    check(told(bench.sampled["s"]), model, PROMPT)
    bench.scheduler.finish("s")


def test_a_target_may_take_a_cached_prefix(runner: Runner) -> None:
    bench = Bench(runner)
    bench.run(Request("before", PROMPT, replace(SAMPLING, prompt_logprobs=None)))
    reservation = bench.scheduler.reserve(Request("t", PROMPT, SAMPLING), 9.0)
    assert reservation is not None
    assert reservation.num_cached_tokens == len(PROMPT) // 16 * 16
