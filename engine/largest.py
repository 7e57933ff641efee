"""The largest few of wide rows, and their sums of exponentials, faster than in general.

A row is cut into runs. The n-th largest of the runs' maxima is a bound that at least n entries
reach and few others do: only those are sorted. Pure: what comes of a row does not depend on what
else is in the batch. Used by ``sampler``, ``logprobs`` and ``choice``.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_RUN = 64


def largest(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """As ``logits.topk(width)``; of few equal ones that with the lower index comes first.

    Args:
        logits: float32 ``[rows, columns]``, finite.

    Returns:
        Values, descending, and their columns, int64, both ``[rows, width]``.
    """
    num_rows, num_columns = logits.shape
    whole = num_columns - num_columns % _RUN
    if width > whole // _RUN:
        values, columns = logits.topk(width)
        return values, columns
    runs = logits[:, :whole].reshape(num_rows, whole // _RUN, _RUN)
    tops = runs.amax(-1).numpy()
    ids = np.empty((num_rows, width), np.int64)
    for row, entries in enumerate(logits.numpy()):
        bound = np.partition(tops[row], -width)[-width]
        found = np.flatnonzero(entries >= bound)
        ids[row] = found[np.argsort(-entries[found], kind="stable")[:width]]
    columns = torch.from_numpy(ids)
    return logits.gather(1, columns), columns


def logsumexp(logits: Tensor) -> npt.NDArray[np.float64]:
    """Of each row, as exact as float32 exponentials are; their sum is float64, in any order.

    Args:
        logits: float32 ``[rows, columns]``, finite.
    """
    rows = logits.numpy()
    tops = rows.max(-1, initial=-np.inf)
    with np.errstate(over="ignore"):  # of logits of 1e38 and the like
        sums = [np.exp(r - top).sum(dtype=np.float64) for r, top in zip(rows, tops, strict=True)]
    total: npt.NDArray[np.float64] = tops.astype(np.float64) + np.log(np.array(sums, np.float64))
    return total
