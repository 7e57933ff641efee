"""What ``transformers`` writes greedily: how goldens are made. Run by the two makers alone."""

import torch
from transformers import DynamicCache, PreTrainedModel


@torch.inference_mode()
def greedy(
    model: PreTrainedModel, ids: list[int], num_tokens: int
) -> tuple[list[int], list[float]]:
    """So many tokens, EOS like any other, and the gap of each to the second best."""
    output: list[int] = []
    gaps: list[float] = []
    past, current = DynamicCache(config=model.config), torch.tensor([ids])
    for _ in range(num_tokens):
        logits = model(current, cache=past, logits_to_keep=1).logits[0, -1]
        values, best = logits.topk(2)
        output.append(int(best[0]))
        gaps.append(round(float(values[0] - values[1]), 5))
        current = best[:1].view(1, 1)
    return output, gaps
