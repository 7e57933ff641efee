"""What the runner asks of a model, and what a model asks of its files.

The seam for other backends: whoever can run ``forward`` over one batch (a native library over
weights it packed itself, say) is a model. Knows nothing of plans, sampling or schedules.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.kv.cache import PagedKvCache
from engine.ops.batch import Batch

OnLayer = Callable[[int], None]
"""Called with i when layer i's K and V of every row of the batch are in the cache."""


class Weights(Protocol):
    """Named tensors under Hugging Face's names; ``engine.loaders`` implements it."""

    def tensor(self, name: str, dtype: str) -> Tensor: ...


class Model(Protocol):
    """A decoder with its weights packed."""

    def forward(self, batch: Batch, cache: PagedKvCache, on_layer: OnLayer) -> Tensor:
        """Write the batch's KV, layer by layer.

        Returns:
            Logits of ``batch.sample_rows``: float32 ``[samples, vocab_size]``.
        """
        ...
