"""One step as tensors: the rows of all its sequences, one after the other.

Knows nothing of models. Made by the runner from a ``StepPlan``, read by models and ops.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kv.cache import key_rows
from engine.plan import ScheduledSequence


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The rows of one sequence: ``num_rows`` tokens at positions ``start`` and on."""

    first_row: int
    num_rows: int
    start: int
    block_table: np.ndarray
    """int64; blocks of positions 0 .. end - 1, at least."""

    @property
    def end(self) -> int:
        return self.start + self.num_rows

    def slots(self, positions: np.ndarray, block_size: int) -> np.ndarray:
        """Where the KV of these positions of this sequence is."""
        return self.block_table[positions // block_size] * block_size + positions % block_size


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """All rows of a step; every tensor is int64."""

    token_ids: Tensor
    """[rows]"""
    positions: Tensor
    """[rows]"""
    key_rows: Tensor
    """[rows]: where their KV goes, see ``engine.kv.cache``."""
    spans: tuple[Span, ...]
    sample_rows: Tensor
    """[samples]: the last row of every sequence that samples, in the plan's order."""


def make_batch(sequences: tuple[ScheduledSequence, ...], block_size: int) -> Batch:
    """Flatten the scheduled sequences. Their block tables must cover their rows."""
    spans, positions, slots, sample_rows = [], [], [], []
    first_row = 0
    for sequence in sequences:
        table = np.array(sequence.block_table, dtype=np.int64)
        span = Span(first_row, len(sequence.token_ids), sequence.start, table)
        at = np.arange(span.start, span.end)
        spans.append(span)
        positions.append(at)
        slots.append(span.slots(at, block_size))
        first_row += span.num_rows
        if sequence.samples:
            sample_rows.append(first_row - 1)
    return Batch(
        token_ids=torch.tensor([t for s in sequences for t in s.token_ids], dtype=torch.int64),
        positions=torch.from_numpy(np.concatenate(positions)),
        key_rows=key_rows(torch.from_numpy(np.concatenate(slots)), block_size),
        spans=tuple(spans),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
    )
