"""How probable a model thought a token: log-softmax of its logits as they came out of the model.

Before bias, penalties, temperature and filters, so the numbers say what the model thinks, not
what it was asked to do. In float64, so that they do not depend on the order of a sum.
Knows nothing of requests. Called by ``choice`` and ``prompt_rows``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import TokenLogprobs


def logprobs_of(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """One record a row.

    Args:
        logits: float32 ``[rows, vocab_size]``.
        token_ids: the token of each row.
        num_top: how many of the most probable ones to tell of each row.
    """
    if not token_ids:
        return []
    exact = logits.double()
    total = exact.logsumexp(-1)
    mine = exact.gather(1, torch.tensor(token_ids).unsqueeze(1))
    ranks = (exact > mine).sum(-1, keepdim=True) + 1
    values, ids = exact.topk(min(max(num_top), logits.shape[1]))
    top_logprobs, top_ids = (values - total.unsqueeze(1)).tolist(), ids.tolist()
    own = (mine.squeeze(1) - total).tolist()
    tops = [tuple(zip(*row, strict=True)) for row in zip(top_ids, top_logprobs, strict=True)]
    columns = zip(token_ids, own, ranks.squeeze(-1).tolist(), tops, num_top, strict=True)
    return [
        TokenLogprobs(token_id, logprob, rank, top[:count])
        for token_id, logprob, rank, top, count in columns
    ]
