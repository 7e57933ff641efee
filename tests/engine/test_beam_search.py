"""Beam search: as transformers does it, preempted, aborted, and without a block left behind."""

import itertools
import random
from dataclasses import replace
from typing import TypeGuard

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import CapacityError
from engine.kv.manager import KvManager
from engine.loaders.open import open_model
from engine.mock_runner import TOKENS, MockRunner
from engine.plan import BeamsEnded, Failed, StepResult
from engine.request import BeamSearch, FinishReason, Purpose, Request, SamplingParams
from engine.runner import Runner
from engine.scheduler import Scheduler
from tests.engine.models.tiny_llama import SHAPES, random_llama, write_directory
from tests.engine.runner_bench import Bench

EOS = 0
PROMPT = tuple((7 * i) % 250 for i in range(37))
# Frequent enough among the candidates that some beams end and others do not.
STOPS = tuple(range(3, 250, 16))


@pytest.fixture(scope="module")
def model():
    return random_llama(SHAPES[1])


@pytest.fixture(scope="module")
def runner(model, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    files = open_model(str(write_directory(model, tmp_path_factory.mktemp("model") / "tiny")))
    return Runner(EngineConfig(dtype="float32", block_size=16, kv_cache_bytes=1 << 20), files)


def search(width: int, max_tokens: int = 12, **search_fields: object) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        stop_token_ids=STOPS,
        beam_search=BeamSearch(width, **search_fields),
    )


def found(runner: Runner, *requests: Request, num_blocks: int = 64) -> Bench:
    bench = Bench(runner, num_blocks, [EOS])
    bench.run(*requests)
    assert bench.kv.stats().held == 0
    return bench


def oracle(model, prompt: tuple[int, ...], sampling: SamplingParams) -> list[tuple[int, ...]]:
    beam = sampling.beam_search
    assert beam is not None
    whole = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        num_beams=beam.width,
        num_return_sequences=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
        max_new_tokens=sampling.max_tokens,
        eos_token_id=[EOS, *STOPS],
        pad_token_id=EOS,
    )
    answers = []
    for row in whole[:, len(prompt) :].tolist():
        end = next((i for i, t in enumerate(row, 1) if t in (EOS, *STOPS)), len(row))
        answers.append(tuple(row[:end]))
    return answers


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_it_is_transformers(
    runner: Runner, model, width: int, length_penalty: float, early_stopping: bool
) -> None:
    sampling = search(width, length_penalty=length_penalty, early_stopping=early_stopping)
    for length in (1, 16, 37):
        prompt = PROMPT[:length]
        ours = found(runner, Request("r", prompt, sampling)).found["r"]
        assert [each.token_ids for each in ours] == oracle(model, prompt, sampling)
        assert [each.score for each in ours] == sorted((each.score for each in ours), reverse=True)


def test_some_of_them_end_early_and_some_run_to_the_limit(runner: Runner) -> None:
    """Else the test above would show little."""
    every = [
        each
        for length in (1, 16, 37)
        for each in found(runner, Request("r", PROMPT[:length], search(5))).found["r"]
    ]
    assert {each.finish_reason for each in every} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len({len(each.token_ids) for each in every}) > 2


def test_a_score_is_what_the_model_says(runner: Runner, model) -> None:
    [best, *_] = found(runner, Request("r", PROMPT, search(3))).found["r"]
    ids = torch.tensor([(*PROMPT, *best.token_ids)])
    with torch.inference_mode():
        logprobs = model(ids).logits[0].double().log_softmax(-1)
    rows = range(len(PROMPT) - 1, ids.shape[1] - 1)
    expected = sum(float(logprobs[i, ids[0, i + 1]]) for i in rows)
    assert best.cumulative_logprob == pytest.approx(expected, abs=1e-3)
    assert best.score == pytest.approx(expected / len(best.token_ids), abs=1e-4)


def test_adjustments_count_on_top_of_logprobs(runner: Runner) -> None:
    free = search(3, max_tokens=6)
    banned = replace(free, bad_words=((5,), (9, 4)), logit_bias=((11, 5.0),), min_tokens=4)
    for each in found(runner, Request("r", PROMPT, banned)).found["r"]:
        assert 5 not in each.token_ids and (9, 4) not in itertools.pairwise(each.token_ids)
        assert len(each.token_ids) >= 4
        assert not {EOS, *STOPS}.intersection(each.token_ids[:4])


def test_a_preempted_search_finds_the_same(runner: Runner) -> None:
    sampling = replace(search(4, max_tokens=40), stop_token_ids=(), ignore_eos=True)
    requests = [Request(f"r{i}", (i, *PROMPT), sampling) for i in range(3)]
    plain = Request("plain", PROMPT[::-1], replace(sampling, beam_search=None))
    alone = {r.request_id: found(runner, r).found[r.request_id] for r in requests}
    together = found(runner, *requests, plain, num_blocks=18)
    assert together.scheduler.stats().num_preemptions > 0
    assert {name: together.found[name] for name in alone} == alone
    by_itself = found(runner, plain).sampled["plain"]
    assert [e.token_id for e in together.sampled["plain"]] == [e.token_id for e in by_itself]


def test_what_could_never_end_is_refused() -> None:
    scheduler = Scheduler(EngineConfig(block_size=16), KvManager(10, 16, "m"), [], 160)
    request = Request("r", PROMPT, search(4, max_tokens=60))
    with pytest.raises(CapacityError, match="shorter"):
        scheduler.add(request, Purpose.LOCAL, 0.0)
    scheduler.add(replace(request, sampling=search(4, max_tokens=20)), Purpose.LOCAL, 0.0)


SOME_LETTERS = tuple(TOKENS[::5])


def made_up(chance: random.Random, name: str) -> Request:
    """A search, or at times a plain answer."""
    width = chance.choice([0, 2, 3, 4])
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=chance.randint(1, 40),
        stop_token_ids=SOME_LETTERS if chance.random() < 0.7 else (),
        beam_search=BeamSearch(width, chance.choice([0.0, 1.0, 3.0])) if width else None,
    )
    return Request(name, tuple(chance.choices(range(30), k=chance.randint(1, 60))), sampling)


def undisturbed(request: Request) -> list[object]:
    """What is told of a search where nothing goes wrong."""
    scheduler = Scheduler(EngineConfig(block_size=16), KvManager(64, 16, "m"), [], 200)
    scheduler.add(request, Purpose.LOCAL, 0.0)
    runner, told = MockRunner(64, 16, num_layers=1), list[object]()
    while scheduler.has_work():
        plan, _ = scheduler.plan(1000)
        told += [e.hypotheses for e in scheduler.apply(plan, runner.run(plan)) if is_found(e)]
    return told


def is_found(event: object) -> TypeGuard[BeamsEnded]:
    return isinstance(event, BeamsEnded)


def spoiled(chance: random.Random, result: StepResult) -> StepResult | None:
    """Rows are lost, rows fail, and steps crash."""
    if chance.random() < 0.01:
        return None
    for request_id in list(result.token_ids):
        if chance.random() < 0.02:
            del result.token_ids[request_id]
            result.candidates.pop(request_id, None)
        elif chance.random() < 0.003:
            result.failures[request_id] = "made up"
    return result


@pytest.mark.parametrize("seed", range(25))
def test_nothing_is_lost_whatever_happens(seed: int) -> None:
    """And what is found is what is found alone: KV that went astray would answer otherwise."""
    chance = random.Random(seed)
    config = EngineConfig(block_size=16, max_decode_sequences=10, token_budget=64)
    kv, runner = KvManager(20, 16, "m"), MockRunner(20, 16, num_layers=1)
    scheduler = Scheduler(config, kv, [], 200)
    running: dict[str, Request] = {}
    started = num_found = 0
    for step in range(900):
        if started < 60 and chance.random() < 0.6:
            request = made_up(chance, f"r{started}")
            scheduler.add(request, Purpose.LOCAL, float(step))
            running[request.request_id] = request
            started += 1
        plan, _ = scheduler.plan(32)
        scheduler.check_integrity()
        if running and chance.random() < 0.02:
            name = chance.choice(sorted(running))
            scheduler.finish(name)
            del running[name]
        if not plan.sequences:
            continue
        result = spoiled(chance, runner.run(plan))
        ids = [row.request_id for row in plan.sequences]
        events = scheduler.fail(ids, "crash") if result is None else scheduler.apply(plan, result)
        for event in events:
            assert event.request_id in running, "told after its end"
            if is_found(event):
                assert [event.hypotheses] == undisturbed(running[event.request_id])
                num_found += 1
            if isinstance(event, BeamsEnded | Failed) or getattr(event, "finish_reason", None):
                del running[event.request_id]
        scheduler.check_integrity()
    assert not running and started == 60 and num_found > 10
    assert kv.stats().held == 0 and scheduler.stats().num_preemptions > 0
