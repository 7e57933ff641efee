"""What each numeric recipe costs in accuracy: ``python -m benchmarks.recipes [MODEL]``.

Perplexity of a committed text, and how often the most likely next token is the same as in
float32, position by position, every position given the same true past. Prints a Markdown table.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.kv.cache import PagedKvCache
from engine.loaders.files import ModelFiles
from engine.loaders.open import open_model
from engine.models.choose import choose
from engine.models.on_native import FileWeights
from engine.ops.cpu.native_model import NativeLlama, SequenceRows
from engine.ops.cpu.weights import PackedWeights
from engine.recipe import KV_DTYPES

TEXT = Path(__file__).parent / "data" / "prose.txt"
RECIPES = tuple(
    (weights, kv) for kv in KV_DTYPES for weights in ("float32", "bf16", "int8", "file")
)
"""Weights, and what KV is kept as."""
BLOCK_SIZE = 16


def all_logits(
    files: ModelFiles, token_ids: list[int], weights: str, kv_dtype: str = "auto"
) -> torch.Tensor:
    """float32 [tokens, vocab_size] of one prompt, computed in one recipe."""
    config = EngineConfig(weights=weights, kv_dtype=kv_dtype, block_size=BLOCK_SIZE)
    choice = choose(config, files)
    if not choice.is_native:
        raise ModelError("the native kernels do not run here: nothing to compare")
    num_blocks = choice.layout.num_blocks_for(len(token_ids))
    model = NativeLlama(files.config, PackedWeights(files.config, FileWeights(files), weights))
    rows = SequenceRows(0, len(token_ids), np.arange(num_blocks, dtype=np.int32))
    cache = PagedKvCache(choice.layout, num_blocks)
    return torch.from_numpy(model.forward(token_ids, [rows], range(len(token_ids)), cache))


def perplexity(logits: torch.Tensor, token_ids: list[int]) -> float:
    """Of the text after its first token."""
    losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:]))
    return float(losses.exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    files = open_model(parser.parse_args().model)
    token_ids = files.tokenizer().encode(TEXT.read_text("utf-8"))
    exact = all_logits(files, token_ids, "float32")
    base = perplexity(exact, token_ids)
    print(f"{files.model_id}, {len(token_ids)} tokens of {TEXT.name}\n")
    print("| weights | KV | perplexity | against float32 | same most likely token |")
    print("| --- | --- | --- | --- | --- |")
    for weights, kv_dtype in RECIPES:
        try:
            logits = all_logits(files, token_ids, weights, kv_dtype)
        except ModelError as error:
            print(f"| {weights} | {kv_dtype} | {error} | | |")
            continue
        ours = perplexity(logits, token_ids)
        same = (logits.argmax(-1) == exact.argmax(-1)).float().mean().item()
        print(f"| {weights} | {kv_dtype} | {ours:.3f} | {ours / base - 1:+.2%} | {same:.1%} |")


if __name__ == "__main__":
    main()
