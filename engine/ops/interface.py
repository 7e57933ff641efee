"""The seam between models and backends: what a model needs computed, and nothing else.

Knows nothing of layers, weights' names or schedules. Implemented by ``reference`` (the oracle) and
``torch_cpu``; called by the models. A backend that runs a whole forward in one native call takes
the place of the model instead (``engine.models.interface``).
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from engine.kv.cache import Layer
from engine.ops.batch import Batch
from kvtransfer.layout import KvLayout

Linear = Callable[[Tensor], Tensor]
"""``[rows, in] -> [rows, out]``."""

Prepared = TypeVar("Prepared")
"""What a backend works out once a step for the attention of all layers."""


class Ops(Protocol[Prepared]):
    """Operations of a decoder. Activations are ``[rows, ...]`` in the model's dtype."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """``weight``: ``[out, in]``; ``bias``: ``[out]``. Repacked perhaps; the caller should drop
        its own."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension, accumulated in float32."""
        ...

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate dimension i with i + head_dim / 2 (Hugging Face's order), in float32.

        Args:
            x: ``[rows, heads, head_dim]``.
            cos, sin: float32 ``[rows, head_dim / 2]``, of each row's angles.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``[rows, 2 * n] -> [rows, n]``: silu of the first half times the second."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """``[rows, 2 * n] -> [rows, n]``: tanh GELU of the first half times the second."""
        ...

    def prepare_attention(self, batch: Batch, layout: KvLayout, num_heads: int) -> Prepared:
        """Once a step, on the host. ``num_heads``: query heads."""
        ...

    def attention(
        self,
        queries: Tensor,
        layer: Layer,
        prepared: Prepared,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Causal attention of every row over its own sequence's blocks, grouped queries.

        Args:
            queries: ``[rows, num_heads, head_dim]``.
            layer: the KV of one layer, ``[num_blocks, 2, block_size, num_kv_heads, head_dim]``;
                or the same in int8; that of the batch's own rows is already in it.
            scale: multiplies scores; None: head_dim ** -0.5.
            window: positions that a row sees, its own included; None: all.
            soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap); None: they stay.

        Returns:
            ``[rows, num_heads * head_dim]``.
        """
        ...
