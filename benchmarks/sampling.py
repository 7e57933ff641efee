"""What choosing tokens costs, as a share of a decode step: ``python -m benchmarks.sampling``.

One thread, random logits as wide as the model's vocabulary, a batch of rows that all ask for the
same; the step is a forward of that batch over the model's own weights plus the choice. Prints a
Markdown table. Use a quiet machine and pin it: ``OMP_NUM_THREADS=1 taskset -c 0``.
"""

import argparse
import functools
import random
from typing import Any

import torch

from benchmarks.cpu import best_s
from engine.choice import choose_tokens
from engine.config import EngineConfig
from engine.guide import Guides
from engine.kv.cache import PagedKvCache
from engine.loaders.files import ModelFiles
from engine.loaders.open import open_model
from engine.models.choose import build, choose, read_weights
from engine.plan import ScheduledSequence
from engine.request import SamplingParams

PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
}
FILTERS: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.02,
    "typical_p": 0.9,
}
WAYS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "all filters": SamplingParams(**FILTERS),
    "greedy, penalties": SamplingParams(temperature=0, **PENALTIES),
    "greedy, 20 logprobs": SamplingParams(temperature=0, logprobs=20),
    "everything": SamplingParams(
        **FILTERS,
        **PENALTIES,
        logprobs=20,
        logit_bias=tuple((token_id, 1.0) for token_id in range(300)),
        bad_words=tuple((token_id, token_id + 1) for token_id in range(64)),
        min_tokens=10_000,
    ),
}


def rows_of(
    sampling: SamplingParams, batch: int, prompt_tokens: int, output_tokens: int, vocab_size: int
) -> tuple[ScheduledSequence, ...]:
    """Decode rows, each in blocks of its own."""
    rng = random.Random(0)
    end = prompt_tokens + output_tokens
    num_blocks = -(-end // EngineConfig().block_size)
    return tuple(
        ScheduledSequence(
            request_id=str(row),
            token_ids=(rng.randrange(vocab_size),),
            start=end - 1,
            block_table=tuple(range(row * num_blocks, (row + 1) * num_blocks)),
            samples=True,
            sampling=sampling,
            prompt_token_ids=tuple(rng.choices(range(vocab_size), k=prompt_tokens)),
            output_token_ids=rng.choices(range(vocab_size), k=output_tokens),
        )
        for row in range(batch)
    )


def forward_s(files: ModelFiles, weights: str, rows: tuple[ScheduledSequence, ...]) -> float:
    """One forward of these rows."""
    config = EngineConfig(weights=weights)
    chosen = choose(config, files)
    cache = PagedKvCache(chosen.layout, len(rows) * len(rows[0].block_table))
    cache.fill(0x3C)  # small numbers in every dtype
    model = build(read_weights(config, files), files.config, 1, rows[0].end)
    with torch.inference_mode():
        return best_s(lambda: model.step(rows, cache, None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    files = open_model(options.model)
    vocab_size = files.config.vocab_size
    shape = (options.batch, options.prompt_tokens, options.output_tokens, vocab_size)
    step_s = forward_s(files, options.weights, rows_of(WAYS["greedy"], *shape))
    logits = torch.randn(options.batch, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    print(
        f"{files.model_id}, batch {options.batch}, {options.prompt_tokens} prompt and "
        f"{options.output_tokens} output tokens: forward {step_s * 1e3:.1f} ms\n"
    )
    print("| sampling | ms | of the step |\n| --- | --- | --- |")
    for name, sampling in WAYS.items():
        rows = rows_of(sampling, *shape)
        chosen = functools.partial(
            choose_tokens, logits, rows, files.config.eos_token_ids, no_guides
        )
        taken_s = best_s(chosen)
        print(f"| {name} | {taken_s * 1e3:.1f} | {taken_s / (taken_s + step_s):.0%} |")


def no_guides() -> Guides:
    """No row has a guide here."""
    raise AssertionError("a row asks for a guide")


if __name__ == "__main__":
    main()
