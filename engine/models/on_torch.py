"""A torch model behind the runner's seam: a plan's sequences become one batch of tensors."""

from torch import Tensor

from engine.kv.cache import PagedKvCache
from engine.models.interface import Model, OnLayer, OtherRows
from engine.ops.batch import make_batch
from engine.plan import ScheduledSequence


class TorchModel:
    """Implements ``engine.models.interface.StepModel``."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def step(
        self,
        sequences: tuple[ScheduledSequence, ...],
        cache: PagedKvCache,
        on_layer: OnLayer | None,
        others: OtherRows | None = None,
    ) -> Tensor:
        batch = make_batch(sequences, cache.layout.block_size)
        return self._model.forward(batch, cache, on_layer or _ignore, others)


def _ignore(layer: int) -> None:
    """Nobody listens for layers."""
