"""How probable a model thought a token: log-softmax of its logits as they came out of the model.

Before bias, penalties, temperature and filters, so the numbers say what the model thinks, not
what it was asked to do. Summed in float64, so that they do not depend on the order of a sum.
Knows nothing of requests. Called by ``choice`` and ``prompt_rows``.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.largest import largest, logsumexp
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
    total = torch.from_numpy(logsumexp(logits))
    mine = logits.gather(1, torch.tensor(token_ids).unsqueeze(1))
    own = (mine.squeeze(1).double() - total).tolist()
    larger = zip(logits.numpy(), mine.numpy(), strict=True)
    ranks = [1 + int(np.count_nonzero(row > value)) for row, value in larger]
    values, ids = largest(logits, min(max(num_top), logits.shape[1]))
    top_logprobs = (values.double() - total.unsqueeze(1)).tolist()
    tops = [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), top_logprobs, strict=True)]
    columns = zip(token_ids, own, ranks, tops, num_top, strict=True)
    return [
        TokenLogprobs(token_id, logprob, rank, top[:count])
        for token_id, logprob, rank, top, count in columns
    ]
