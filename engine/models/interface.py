"""What the runner asks of a model, and what a model asks of its files.

``StepModel`` is the seam for backends: torch over tensors (``on_torch``), native kernels in one
call a step (``on_native``). Knows nothing of sampling or schedules.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.kv.cache import PagedKvCache
from engine.ops.batch import Batch
from engine.plan import ScheduledSequence

OnLayer = Callable[[int], None]
"""Called with i when layer i's K and V of every row of the batch are in the cache."""


class StepModel(Protocol):
    """A model with its weights packed, as the runner drives it."""

    def step(
        self,
        sequences: tuple[ScheduledSequence, ...],
        cache: PagedKvCache,
        on_layer: OnLayer | None,
    ) -> Tensor:
        """Write the KV of all scheduled tokens, layer by layer.

        Args:
            on_layer: called in order, each layer once, before this returns; from any thread.

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

    def forward(self, batch: Batch, cache: PagedKvCache, on_layer: OnLayer) -> Tensor:
        """Write the batch's KV, layer by layer.

        Returns:
            Logits of ``batch.sample_rows``: float32 ``[samples, vocab_size]``.
        """
        ...
