"""Greedy float32 answers of Gemma 3 270M equal ``transformers``, token for token.

One prompt is longer than the window of the model's local layers. How the answers were made:
``tests/goldens/make_gemma_goldens.py``.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.loaders.files import ModelFiles
from engine.loaders.open import open_model
from engine.runner import Runner
from tests.goldens.gemma import HOW_TO_INSTALL, assemble, find_parts
from tests.goldens.replay import BLOCK_SIZE, answers, check

GOLDENS = json.loads(
    (Path(__file__).parent.parent / "goldens" / "gemma3_greedy_float32.json").read_text("utf-8")
)
NUM_TOKENS = 24

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not find_parts(), reason=f"no Gemma 3 270M here: {HOW_TO_INSTALL}"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFiles]:
    path = assemble(find_parts(), tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf")
    yield open_model(str(path))
    path.unlink()


def test_the_goldens_are_what_they_should_be(files: ModelFiles) -> None:
    lengths = [len(golden["prompt_token_ids"]) for golden in GOLDENS]
    window = files.config.window(0)
    assert len(GOLDENS) == 8
    assert window is not None and min(lengths) < window < max(lengths)
    assert all(len(g["output_token_ids"]) == len(g["gaps"]) == NUM_TOKENS for g in GOLDENS)


def test_prompt_texts_encode_to_their_ids_and_back(files: ModelFiles) -> None:
    tokenizer = files.tokenizer()
    for golden in GOLDENS:
        ids = golden["prompt_token_ids"]
        assert tokenizer.encode(golden["prompt"]) == ids, golden["name"]
        assert tokenizer.decode(ids) == golden["prompt"], golden["name"]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_answers(files: ModelFiles, kernels: str) -> None:
    """All prompts at once, in chunks that end inside the window and beyond it."""
    config = EngineConfig(
        dtype="float32", kernels=kernels, block_size=BLOCK_SIZE, kv_cache_bytes=256 << 20
    )
    runner = Runner(config, files)
    check(answers(runner, GOLDENS, chunk=200, num_tokens=NUM_TOKENS))
