"""Greedy float32 answers of the demo model equal ``transformers``, token for token.

The runner is driven by the smallest scheduler there is (``tests.goldens.replay``), so that a
failure here is the model's, not the engine's. The answers and how they were made:
``tests/goldens``.
"""

import json
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.loaders.open import open_model
from engine.runner import Runner
from tests.goldens.replay import BLOCK_SIZE, WHOLE, answers, check

GOLDENS = json.loads(
    (Path(__file__).parent.parent / "goldens" / "smollm2_greedy_float32.json").read_text("utf-8")
)
BY_NAME = {golden["name"]: golden for golden in GOLDENS}
NUM_TOKENS = 64


@pytest.fixture(scope="module", params=["auto", "torch"])
def runner(request: pytest.FixtureRequest) -> Runner:
    """Once on the native kernels, where there are any, and once on torch."""
    config = EngineConfig(
        dtype="float32",
        kernels=request.param,
        block_size=BLOCK_SIZE,
        kv_cache_bytes=160 << 20,
    )
    return Runner(config, open_model("demo"))


def test_the_goldens_are_what_they_should_be() -> None:
    lengths = {len(golden["prompt_token_ids"]) for golden in GOLDENS}
    assert len(GOLDENS) == len(BY_NAME) == 20
    assert {1, 15, 16, 17, 31, 32, 33, 1500} <= lengths
    assert all(len(g["output_token_ids"]) == len(g["gaps"]) == NUM_TOKENS for g in GOLDENS)


def test_prompt_texts_encode_to_their_ids() -> None:
    tokenizer = open_model("demo").tokenizer()
    for golden in GOLDENS:
        assert tokenizer.encode(golden["prompt"]) == golden["prompt_token_ids"], golden["name"]


def test_a_few_prompts_at_once(runner: Runner) -> None:
    names = ("one token", "block size", "two blocks + 1", "chinese", "chat")
    check(answers(runner, [BY_NAME[name] for name in names], chunk=24, num_tokens=24))


def test_one_prompt_alone(runner: Runner) -> None:
    check(answers(runner, [BY_NAME["python"]], WHOLE, num_tokens=24))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", [WHOLE, 64], ids=["whole", "chunks of 64"])
def test_each_prompt_alone(runner: Runner, chunk: int) -> None:
    check([run for g in GOLDENS for run in answers(runner, [g], chunk, NUM_TOKENS)])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", [WHOLE, 64], ids=["whole", "chunks of 64"])
def test_eight_prompts_at_once(runner: Runner, chunk: int) -> None:
    for first in range(0, len(GOLDENS), 8):
        check(answers(runner, GOLDENS[first : first + 8], chunk, NUM_TOKENS))
