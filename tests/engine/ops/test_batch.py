"""A plan's rows as tensors."""

import torch

from engine.ops.batch import make_batch
from engine.plan import ScheduledSequence
from engine.request import SamplingParams

PARAMS = SamplingParams()


def test_rows_positions_slots_and_samples() -> None:
    batch = make_batch(
        (
            ScheduledSequence("a", (7, 8, 9), 3, (5, 2), False, PARAMS),
            ScheduledSequence("b", (1,), 8, (0, 6, 1), True, PARAMS),
            ScheduledSequence("c", (4, 3), 0, (3,), True, PARAMS),
        ),
        block_size=4,
    )
    assert batch.token_ids.tolist() == [7, 8, 9, 1, 4, 3]
    assert batch.positions.tolist() == [3, 4, 5, 8, 0, 1]
    # Position 3 is the last of block 5; 4 and 5 open block 2; a key's row counts K and V rows.
    assert batch.key_rows.tolist() == [43, 16, 17, 8, 24, 25]
    assert batch.sample_rows.tolist() == [3, 5]
    assert [(s.first_row, s.num_rows, s.start, s.end) for s in batch.spans] == [
        (0, 3, 3, 6),
        (3, 1, 8, 9),
        (4, 2, 0, 2),
    ]
    assert batch.key_rows.dtype == batch.sample_rows.dtype == torch.int64


def test_nobody_samples() -> None:
    batch = make_batch((ScheduledSequence("a", (7,), 0, (0,), False, PARAMS),), block_size=4)
    assert batch.sample_rows.shape == (0,)
    assert batch.sample_rows.dtype == torch.int64
