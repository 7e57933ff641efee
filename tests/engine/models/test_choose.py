"""Which recipe a file's types lead to, and that its model is computed with them."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.loaders.open import open_model
from engine.models.choose import choose, read_weights
from engine.ops.cpu.weights import PackedWeights
from tests.engine.loaders.llama_files import random_weights, write_gguf

HEAD, DOWN = "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    "types,kinds",
    [
        ({HEAD: "Q8_0"}, {"bfloat16", "Q8_0"}),
        ({DOWN: "Q4_1"}, {"bfloat16", "Q4_1"}),
        ({HEAD: "Q8_0", DOWN: "Q4_0"}, {"bfloat16", "Q8_0", "Q4_0"}),
    ],
)
def test_blocks_of_layers_or_head_are_taken(
    tmp_path: Path, types: dict[str, str], kinds: set[str]
) -> None:
    files = open_model(str(write_gguf(tmp_path / "tiny.gguf", random_weights(), types)))
    config = EngineConfig(block_size=16)
    assert choose(config, files).recipe.weights == "file"
    weights = read_weights(config, files)
    assert isinstance(weights, PackedWeights) and weights.kinds == kinds


@pytest.mark.parametrize("types", [{}, {HEAD: "F16", DOWN: "Q5_0"}])
def test_without_such_blocks_there_is_no_such_recipe(tmp_path: Path, types: dict[str, str]) -> None:
    files = open_model(str(write_gguf(tmp_path / "tiny.gguf", random_weights(), types)))
    assert choose(EngineConfig(block_size=16), files).recipe.weights != "file"
    with pytest.raises(ModelError, match="weights file: the model has no blocks"):
        choose(EngineConfig(block_size=16, weights="file"), files)
