"""The oracle: every operation as its definition reads, in float32, one sequence at a time.

Slow on purpose. Tests hold every backend against it; it can also run a model.
"""

import torch
from torch import Tensor

from engine.kv.cache import Layer, QuantizedLayer
from engine.ops.batch import Batch
from engine.ops.interface import Linear
from kvtransfer.layout import KvLayout


class ReferenceOps:
    """Implements ``engine.ops.interface.Ops``."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        added = torch.zeros(len(weight)) if bias is None else bias.float()
        return lambda x: (x.float() @ weight.float().T + added).to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(rotated, dim=-1).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return (0.5 * gate * (1 + inner.tanh()) * up).to(gate_up.dtype)

    def prepare_attention(self, batch: Batch, layout: KvLayout, num_heads: int) -> Batch:
        return batch

    def attention(
        self,
        queries: Tensor,
        layer: Layer,
        prepared: Batch,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        num_rows, num_heads, head_dim = queries.shape
        output = torch.empty_like(queries)
        for span in prepared.spans:
            table = torch.from_numpy(span.block_table)
            if isinstance(layer, QuantizedLayer):
                blocks = layer.dequantized(table)
            else:
                blocks = layer[table].float()
            keys = blocks[:, 0].flatten(0, 1)[: span.end]
            values = blocks[:, 1].flatten(0, 1)[: span.end]
            rows = slice(span.first_row, span.first_row + span.num_rows)
            group = num_heads // keys.shape[1]
            position = torch.arange(span.start, span.end).unsqueeze(1)
            at = torch.arange(span.end)
            hidden = at > position
            if window is not None:
                hidden |= at <= position - window
            for head in range(num_heads):
                scores = queries[rows, head].float() @ keys[:, head // group].T
                scores = scores * (head_dim**-0.5 if scale is None else scale)
                if soft_cap is not None:
                    scores = soft_cap * (scores / soft_cap).tanh()
                shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
                output[rows, head] = (shares @ values[:, head // group]).to(queries.dtype)
        return output.view(num_rows, -1)
