"""The largest of a row and its sum of exponentials, against torch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.largest import largest, logsumexp


@given(
    columns=st.integers(1, 700),
    width=st.integers(1, 40),
    rows=st.integers(0, 4),
    levels=st.sampled_from([2, 10, 100_000]),
    seed=st.integers(0, 1000),
)
def test_it_is_topk(columns: int, width: int, rows: int, levels: int, seed: int) -> None:
    """Few levels: many are equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (rows, columns), generator=generator).float()
    width = min(width, columns)
    values, ids = largest(logits, width)
    assert torch.equal(values, logits.topk(width).values)
    assert torch.equal(values, logits.gather(1, ids))
    assert all(len(set(row)) == width for row in ids.tolist())


def test_of_equal_ones_the_first_come_first() -> None:
    logits = torch.zeros(1, 64 * 20)
    logits[0, 700] = 1.0
    assert largest(logits, 4)[1].tolist() == [[700, 0, 1, 2]]


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e37])
def test_logsumexp(scale: float) -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(1)) * scale
    expected = logits.double().logsumexp(-1).numpy()
    np.testing.assert_allclose(logsumexp(logits), expected, rtol=1e-7, atol=1e-7)
    assert logsumexp(logits[:0]).shape == (0,)
