"""Llama: RMS norm, rotary positions, grouped queries, gated SiLU. Readable first.

https://arxiv.org/abs/2302.13971; names and numerics as in Hugging Face's ``LlamaForCausalLM``.
Knows nothing of sequences, blocks or backends: rows go in, ops do the work. Built by the runner.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.kv.cache import PagedKvCache
from engine.models.interface import OnLayer, Weights
from engine.ops.batch import Batch
from engine.ops.interface import Linear, Ops


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One decoder layer's packed weights."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """Implements ``engine.models.interface.Model``."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops[Any], dtype: str) -> None:
        self._config = config
        self._ops = ops
        self._weights = weights
        self._dtype = dtype
        self._embedding = self._tensor("model.embed_tokens.weight")
        self._layers = tuple(self._layer(i) for i in range(config.num_layers))
        self._norm = self._tensor("model.norm.weight")
        # A tied head is packed too: 49,152 rows are a fifth of a decode step, half of it saved.
        self._head = ops.pack_linear(
            self._embedding if config.tied_head else self._tensor("lm_head.weight")
        )
        even = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        self._inverse_frequencies = 1.0 / config.rope_theta ** (even / config.head_dim)

    def forward(self, batch: Batch, cache: PagedKvCache, on_layer: OnLayer) -> Tensor:
        config, ops = self._config, self._ops
        prepared = ops.prepare_attention(batch, cache.layout, config.num_heads)
        angles = batch.positions.float().unsqueeze(1) * self._inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        num_rotated = config.num_heads + config.num_kv_heads
        hidden = self._embedding[batch.token_ids]

        for i, layer in enumerate(self._layers):
            normed = ops.rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
            heads = layer.qkv(normed).unflatten(1, (-1, config.head_dim))
            rotated = ops.rotary(heads[:, :num_rotated], cos, sin)
            queries, keys = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
            cache.write(i, batch.key_rows, keys, heads[:, num_rotated:])
            on_layer(i)
            if i == len(self._layers) - 1 and not len(batch.sample_rows):
                # Nobody asks for what comes after the last layer's KV.
                return torch.empty(0, config.vocab_size)
            attended = ops.attention(queries, cache.layers[i], prepared)
            hidden = hidden + layer.output(attended)
            normed = ops.rms_norm(hidden, layer.mlp_norm, config.rms_norm_eps)
            hidden = hidden + layer.down(ops.silu_mul(layer.gate_up(normed)))

        last = hidden[batch.sample_rows]
        return self._head(ops.rms_norm(last, self._norm, config.rms_norm_eps)).float()

    def _layer(self, i: int) -> Layer:
        name = f"model.layers.{i}."
        return Layer(
            attention_norm=self._tensor(f"{name}input_layernorm.weight"),
            qkv=self._packed(*(f"{name}self_attn.{p}_proj.weight" for p in "qkv")),
            output=self._packed(f"{name}self_attn.o_proj.weight"),
            mlp_norm=self._tensor(f"{name}post_attention_layernorm.weight"),
            gate_up=self._packed(f"{name}mlp.gate_proj.weight", f"{name}mlp.up_proj.weight"),
            down=self._packed(f"{name}mlp.down_proj.weight"),
        )

    def _tensor(self, name: str) -> Tensor:
        return self._weights.tensor(name, self._dtype)

    def _packed(self, *names: str) -> Linear:
        """Several linears of one input as one."""
        return self._ops.pack_linear(torch.cat([self._tensor(name) for name in names]))
