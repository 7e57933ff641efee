"""Dynamic rope scaling: nothing up to the first training's length, transformers' beyond it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.errors import CapacityError
from engine.loaders.open import open_model
from engine.plan import ScheduledSequence, StepPlan
from engine.request import SamplingParams
from engine.runner import Runner
from tests.engine.models.tiny_families import random_model, write_directory

ORIGINAL, LONG = 64, 120
TOLD = SamplingParams(temperature=0.0, prompt_logprobs=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_directory(random_model("mistral, whole"), tmp_path_factory.mktemp("dynamic"))
    config = json.loads((directory / "config.json").read_text())
    config["max_position_embeddings"] = ORIGINAL
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def engine(path: Path, max_context: int, kernels: str = "auto") -> Runner:
    config = EngineConfig(
        dtype="float32", kv_cache_bytes=1 << 20, max_context=max_context, kernels=kernels
    )
    return Runner(config, open_model(str(path)))


def logprobs(runner: Runner, ids: list[int]) -> list[float]:
    """Of every token but the first."""
    table = tuple(range(-(-len(ids) // 16)))
    row = ScheduledSequence("r", tuple(ids), 0, table, True, TOLD, prompt_token_ids=tuple(ids))
    told = runner.run(StepPlan(0, (row,))).prompt_logprobs["r"]
    return [record.logprob for record in told]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(("max_context", "length"), [(0, ORIGINAL), (0, 20), (LONG, LONG)])
@torch.inference_mode()
def test_it_is_transformers_at_that_length(
    path: Path, kernels: str, max_context: int, length: int
) -> None:
    ids = [(11 * i) % 251 for i in range(length)]
    oracle = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    rows = oracle(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
    expected = [float(rows[i, token_id]) for i, token_id in enumerate(ids[1:])]
    assert logprobs(engine(path, max_context, kernels), ids) == pytest.approx(expected, abs=1e-4)


def test_stretched_kv_is_other_kv(path: Path) -> None:
    plain, long = engine(path, 0), engine(path, LONG)
    assert (plain.max_context, long.max_context) == (ORIGINAL, LONG)
    assert plain.model_digest == engine(path, ORIGINAL).model_digest != long.model_digest
    ids = [(11 * i) % 251 for i in range(20)]
    assert logprobs(plain, ids) != pytest.approx(logprobs(long, ids), abs=1e-4)
    with pytest.raises(CapacityError, match=f"trained for {2 * ORIGINAL} tokens"):
        engine(path, 2 * ORIGINAL + 1)


def test_only_dynamic_scaling_stretches(path: Path) -> None:
    config = open_model(str(path)).config
    assert config.longest_context == 2 * ORIGINAL
    fixed = replace(config, rope_scaling=None)
    assert fixed.longest_context == ORIGINAL and fixed.stretched(LONG) is fixed
    assert config.stretched(0) is config.stretched(ORIGINAL) is config
