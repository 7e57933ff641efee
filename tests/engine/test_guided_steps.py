"""Guides through scheduler and runner: preempted, forked, and against every other parameter."""

import json
import re
from dataclasses import replace

import jsonschema
import pytest

from engine.config import EngineConfig
from engine.kv.manager import KvManager
from engine.loaders.files import ModelFiles
from engine.loaders.open import open_model
from engine.plan import CutShort, Sampled
from engine.request import FinishReason, Guide, GuideKind, Purpose, Request, SamplingParams
from engine.runner import Runner
from engine.scheduler import Scheduler
from tests.engine.loaders.llama_files import EOS, random_weights, write_gguf

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["ab", "abc", "é"]}, "minItems": 2},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
PERSON = Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA))
NUM_FORKS = 3
CONFIG = EngineConfig(dtype="float32", block_size=16, kv_cache_bytes=1 << 20, max_context=250)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    path = write_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf",
        random_weights(),
        keys={"llama.context_length": 256},
    )
    return open_model(str(path))


@pytest.fixture(scope="module")
def runner(files: ModelFiles) -> Runner:
    return Runner(CONFIG, files)


Ended = dict[str, tuple[list[int], FinishReason | None]]


def run(runner: Runner, num_blocks: int, requests: list[Request]) -> tuple[Ended, int]:
    """Every answer's tokens without its EOS, and how it ended; and how often one was preempted."""
    kv = KvManager(num_blocks, CONFIG.block_size, "m")
    scheduler = Scheduler(CONFIG, kv, [EOS], 250)
    for arrival_s, request in enumerate(requests):
        scheduler.add(request, Purpose.LOCAL, float(arrival_s))
    ended: Ended = {}
    while scheduler.has_work():
        plan, _ = scheduler.plan(1000)
        for event in scheduler.apply(plan, runner.run(plan)):
            assert isinstance(event, Sampled) or not hasattr(event, "reason"), event
            if isinstance(event, Sampled):
                tokens, _ = ended.get(event.request_id, ([], None))
                kept = [] if event.finish_reason is FinishReason.STOP else [event.token_id]
                ended[event.request_id] = (tokens + kept, event.finish_reason)
                if event.finish_reason is not None:
                    scheduler.finish(event.request_id)
        scheduler.check_integrity()
    return ended, scheduler.stats().num_preemptions


def request(seed: int, guide: Guide = PERSON, **params: object) -> Request:
    sampling = SamplingParams(max_tokens=200, seed=seed, guide=guide)
    prompt = tuple(range(97 + seed, 107 + seed))
    return Request(f"r{seed}", prompt, replace(sampling, **params))


def test_preempted_and_forked_answers_equal_the_undisturbed(
    files: ModelFiles, runner: Runner
) -> None:
    requests = [request(seed, n=NUM_FORKS) for seed in range(4)]
    alone: Ended = {}
    for each in requests:
        answers, preemptions = run(runner, 120, [each])
        assert preemptions == 0
        alone |= answers
    together, preemptions = run(runner, 20, requests)
    assert preemptions > 0
    assert together == alone and len(alone) == len(requests) * NUM_FORKS
    tokenizer = files.tokenizer()
    texts = {tokenizer.decode(tokens) for tokens, _ in alone.values()}
    assert len(texts) > len(requests)
    for tokens, reason in alone.values():
        if reason is FinishReason.STOP:
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), SCHEMA)
    assert sum(reason is FinishReason.STOP for _, reason in alone.values()) > len(alone) / 2


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 150},
        {"logit_bias": ((EOS, 100.0), (ord("z"), 100.0), (ord("a"), -100.0))},
        {"bad_words": ((ord("a"),), (ord("b"),), (ord("a"), ord("b")))},
        {"repetition_penalty": 10.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_p": 0.01, "min_p": 0.9, "typical_p": 0.1},
    ],
    ids=lambda params: next(iter(params)),
)
def test_a_guide_wins_over_every_other_parameter(
    files: ModelFiles, runner: Runner, params: dict[str, object]
) -> None:
    guide = Guide(GuideKind.REGEX, "[ab]{3,9}-(no|yes)")
    requests = [request(seed, guide, **params) for seed in range(5)]
    answers, _ = run(runner, 120, requests)
    for tokens, reason in answers.values():
        assert reason is FinishReason.STOP
        assert re.fullmatch(guide.source, files.tokenizer().decode(tokens))


ALTERNATIVES = " | ".join(" ".join("s" * length) for length in range(2, 12))
AMBIGUOUS = Guide(GuideKind.GRAMMAR, f'start: s\ns: "a" | {ALTERNATIVES}')
"""More ways to read a few dozen letters than llguidance follows."""


@pytest.mark.parametrize("n", [1, 2])
def test_a_guide_that_gives_up_is_no_stop(runner: Runner, n: int) -> None:
    kv = KvManager(120, CONFIG.block_size, "m")
    scheduler = Scheduler(CONFIG, kv, [EOS], 250)
    scheduler.add(request(1, AMBIGUOUS, logit_bias=((EOS, -100.0),), n=n), Purpose.LOCAL, 0.0)
    scheduler.add(request(2, max_tokens=60), Purpose.LOCAL, 1.0)
    told: dict[str, list[object]] = {}
    while scheduler.has_work():
        plan, _ = scheduler.plan(1000)
        for event in scheduler.apply(plan, runner.run(plan)):
            told.setdefault(event.request_id, []).append(event)
        scheduler.check_integrity()
    for name in ("r1", "r1/1")[:n]:
        *written, last = told[name]
        assert len(written) > 20 and all(isinstance(each, Sampled) for each in written)
        assert isinstance(last, CutShort) and "max is 2000" in last.reason
    assert all(isinstance(each, Sampled) for each in told["r2"])
    assert kv.stats().held == 0


def test_guided_and_free_answers_share_a_step(runner: Runner) -> None:
    free = replace(request(9), sampling=SamplingParams(max_tokens=20, seed=9))
    alone, _ = run(runner, 120, [free])
    together, _ = run(runner, 120, [request(1), free, request(2)])
    assert together["r9"] == alone["r9"]
