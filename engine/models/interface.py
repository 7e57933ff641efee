"""What the runner asks of a model, and what a model asks of its files.

``StepModel`` is the seam for backends: torch over tensors (``on_torch``), native kernels in one
call a step (``on_native``). Knows nothing of sampling or schedules.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.kv.cache import PagedKvCache
from engine.ops.batch import Batch
from engine.plan import ScheduledSequence

OnLayer = Callable[[int], None]
"""Called with i when layer i's K and V of every row of the batch are in the cache."""


MOST_ROWS = 32
"""Of a block of logits: 32 rows of 262,144 tokens are 32 MiB in float32."""


@dataclass(frozen=True, slots=True)
class OtherRows:
    """Rows whose logits are wanted beside those that sample, a block at a time."""

    rows: Sequence[int]
    """Of the batch, in order; never empty."""
    take: Callable[[Tensor], None]
    """Called with logits float32 ``[some, vocab_size]``, block after block."""

    def blocks(self) -> Iterator[Sequence[int]]:
        """The rows, as many at once as memory should hold logits of."""
        for first in range(0, len(self.rows), MOST_ROWS):
            yield self.rows[first : first + MOST_ROWS]


class StepModel(Protocol):
    """A model with its weights packed, as the runner drives it."""

    def step(
        self,
        sequences: tuple[ScheduledSequence, ...],
        cache: PagedKvCache,
        on_layer: OnLayer | None,
        others: OtherRows | None = None,
    ) -> Tensor:
        """Write the KV of all scheduled tokens, layer by layer.

        Args:
            on_layer: called in order, each layer once, before this returns; from any thread.
            others: further rows; all are told before this returns.

        Returns:
            Logits of the last row of every sequence that samples: float32
            ``[samples, vocab_size]``, in the plan's order.
        """
        ...


class Weights(Protocol):
    """Named tensors under Hugging Face's names; ``engine.loaders`` implements it."""

    def tensor(self, name: str, dtype: str) -> Tensor: ...


class Model(Protocol):
    """A decoder in torch, over the rows of one batch."""

    def forward(
        self,
        batch: Batch,
        cache: PagedKvCache,
        on_layer: OnLayer,
        others: OtherRows | None = None,
    ) -> Tensor:
        """Write the batch's KV, layer by layer.

        Returns:
            Logits of ``batch.sample_rows``: float32 ``[samples, vocab_size]``.
        """
        ...
