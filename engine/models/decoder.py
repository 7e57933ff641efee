"""A decoder in torch: RMS norms, rotary positions, grouped queries, a gated MLP. Readable first.

One for all families: what sets them apart (biases, norms, windows, soft caps) is data in
``ModelConfig``. Names and numerics are those of Hugging Face's models. Knows nothing of
sequences, blocks or backends: rows go in, ops do the work. Built by the runner.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.kv.cache import PagedKvCache
from engine.models.interface import OnLayer, OtherRows, Weights
from engine.ops.batch import Batch
from engine.ops.interface import Linear, Ops
from engine.ops.rope import Rope


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One decoder layer's packed weights."""

    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    """Of each head: ``[head_dim]``."""
    output: Linear
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    mlp_post_norm: Tensor | None


class Decoder:
    """Implements ``engine.models.interface.Model``."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops[Any], dtype: str) -> None:
        self._config = config
        self._ops = ops
        self._weights = weights
        self._dtype = dtype
        self._embedding = self._tensor("model.embed_tokens.weight")
        self._layers = tuple(self._layer(i) for i in range(config.num_layers))
        self._norm = self._norm_weight("model.norm")
        # A tied head is packed too: 49,152 rows are a fifth of a decode step, half of it saved.
        self._head = ops.pack_linear(
            self._embedding if config.tied_head else self._tensor("lm_head.weight")
        )
        self._rope, self._local_rope = Rope(config), Rope(config, is_local=True)
        self._activate = {"silu": ops.silu_mul, "gelu": ops.gelu_mul}[config.activation]
        # As the models were trained: rounded to the type of the activations.
        self._embedding_scale = torch.tensor(config.embedding_scale).to(self._embedding.dtype)

    def forward(
        self,
        batch: Batch,
        cache: PagedKvCache,
        on_layer: OnLayer,
        others: OtherRows | None = None,
    ) -> Tensor:
        config, ops = self._config, self._ops
        prepared = ops.prepare_attention(batch, cache.layout, config.num_heads)
        angles = self._rope.angles(batch.positions)
        local_angles = angles
        if config.local_rope_theta is not None:
            local_angles = self._local_rope.angles(batch.positions)
        hidden = self._embedding[batch.token_ids]
        if config.embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale

        for i, layer in enumerate(self._layers):
            normed = self._normed(hidden, layer.attention_norm)
            heads = layer.qkv(normed).unflatten(1, (-1, config.head_dim))
            turned = local_angles if config.has_local_rope(i) else angles
            queries, keys, values = self._rotated(heads, layer, *turned)
            cache.write(i, batch.key_rows, keys, values)
            on_layer(i)
            if i == len(self._layers) - 1 and not len(batch.sample_rows) and others is None:
                # Nobody asks for what comes after the last layer's KV.
                return torch.empty(0, config.vocab_size)
            attended = ops.attention(
                queries,
                cache.layers[i],
                prepared,
                scale=config.attention_scale,
                window=config.window(i),
                soft_cap=config.attention_soft_cap,
            )
            hidden = hidden + self._normed(layer.output(attended), layer.attention_post_norm)
            normed = self._normed(hidden, layer.mlp_norm)
            given = layer.down(self._activate(layer.gate_up(normed)))
            hidden = hidden + self._normed(given, layer.mlp_post_norm)

        if others is not None:
            for rows in others.blocks():
                others.take(self._logits(hidden[torch.tensor(rows)]))
        return self._logits(hidden[batch.sample_rows])

    def _logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden_size] -> [rows, vocab_size]``, float32."""
        logits = self._head(self._normed(hidden, self._norm)).float()
        cap = self._config.logits_soft_cap
        return logits if cap is None else cap * (logits / cap).tanh()

    def _rotated(
        self, heads: Tensor, layer: Layer, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values from ``[rows, all heads, head_dim]``."""
        num_heads = self._config.num_heads
        turning = heads[:, : num_heads + self._config.num_kv_heads]
        if layer.query_norm is not None:
            parts = (turning[:, :num_heads], turning[:, num_heads:])
            norms = (layer.query_norm, layer.key_norm)
            turning = torch.cat(
                [self._normed(part, norm) for part, norm in zip(parts, norms, strict=True)], dim=1
            )
        rotated = self._ops.rotary(turning, cos, sin)
        return rotated[:, :num_heads], rotated[:, num_heads:], heads[:, turning.shape[1] :]

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Over the last dimension; as it is where the model has no norm."""
        if weight is None:
            return x
        rows = x.reshape(-1, x.shape[-1])
        return self._ops.rms_norm(rows, weight, self._config.rms_norm_eps).view(x.shape)

    def _layer(self, i: int) -> Layer:
        config, name = self._config, f"model.layers.{i}."
        attention, mlp = f"{name}self_attn.", f"{name}mlp."
        mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        return Layer(
            attention_norm=self._norm_weight(f"{name}input_layernorm"),
            qkv=self._packed(config.qkv_bias, *(f"{attention}{p}_proj" for p in "qkv")),
            query_norm=self._norm_weight(f"{attention}q_norm") if config.head_norms else None,
            key_norm=self._norm_weight(f"{attention}k_norm") if config.head_norms else None,
            output=self._packed(config.output_bias, f"{attention}o_proj"),
            attention_post_norm=(
                self._norm_weight(f"{name}post_attention_layernorm") if config.post_norms else None
            ),
            mlp_norm=self._norm_weight(f"{name}{mlp_norm}"),
            gate_up=self._packed(config.mlp_bias, f"{mlp}gate_proj", f"{mlp}up_proj"),
            down=self._packed(config.mlp_bias, f"{mlp}down_proj"),
            mlp_post_norm=(
                self._norm_weight(f"{name}post_feedforward_layernorm")
                if config.post_norms
                else None
            ),
        )

    def _tensor(self, name: str) -> Tensor:
        return self._weights.tensor(name, self._dtype)

    def _norm_weight(self, name: str) -> Tensor:
        if not self._config.norms_add_one:
            return self._tensor(f"{name}.weight")
        whole = self._weights.tensor(f"{name}.weight", "float32") + 1.0
        return whole.to(self._embedding.dtype)

    def _packed(self, has_bias: bool, *names: str) -> Linear:
        """Several linears of one input as one."""
        weight = torch.cat([self._tensor(f"{name}.weight") for name in names])
        bias = torch.cat([self._tensor(f"{name}.bias") for name in names]) if has_bias else None
        return self._ops.pack_linear(weight, bias)
