"""What every kind of model on disk offers, and the checks that all kinds share. No torch here.

``ModelFiles`` is the seam between formats and the rest: the router asks it for configuration,
tokenizer and identity, the worker also for tensors. Tensors go by their canonical names, those of
a Hugging Face checkpoint, whatever the file calls them. Implemented by ``gguf_model`` and
``hf_directory``, made by ``open``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.config import ModelConfig
from engine.errors import CorruptModel, UnsupportedModel
from engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
DTYPES = ("float32", "bfloat16", "float16")
"""What a tensor can be asked for in."""

_SAMPLE_BYTES = 4096
_MAX_CONFIG_INT = 1 << 31


class ModelFiles(ABC):
    """One model on disk, its metadata checked, its weights still unread."""

    def __init__(self, model_id: str, aliases: tuple[str, ...], config: ModelConfig) -> None:
        self.model_id = model_id
        self.aliases = aliases
        self.config = config

    @cached_property
    def identity(self) -> str:
        """sha256 in hex over configuration, tokenizer and weights (samples of every tensor).

        Equal in every process and place; different for files of different values, short of an
        edit that touches neither the first nor the last 4 KiB of any tensor.
        """
        digest = hashlib.sha256()
        config = json.dumps(dataclasses.asdict(self.config), sort_keys=True)
        for part in (config.encode(), *self._tokenizer_bytes()):
            _feed(digest, part)
        for name, type_name, shape, stored in sorted(self._stored(), key=lambda item: item[0]):
            _feed(digest, json.dumps([name, type_name, list(shape)]).encode())
            _feed(digest, stored[:_SAMPLE_BYTES].tobytes())
            _feed(digest, stored[-_SAMPLE_BYTES:].tobytes())
        return digest.hexdigest()

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer, chat template included."""

    @abstractmethod
    def tensor_names(self) -> tuple[str, ...]:
        """Canonical names of the tensors that the model computes with."""

    @abstractmethod
    def tensor(self, name: str, dtype: str) -> torch.Tensor:
        """The tensor in ``dtype``, one of ``DTYPES``, rows in Hugging Face order.

        A view of the mapped file where the stored values already are what is asked for (do not
        write to it), a new tensor otherwise.
        """

    @abstractmethod
    def _tokenizer_bytes(self) -> Iterable[bytes]:
        """What the tokenizer is made from."""

    @abstractmethod
    def _stored(self) -> Iterator[tuple[str, str, tuple[int, ...], npt.NDArray[np.uint8]]]:
        """Name, type name, shape and mapped bytes of every tensor."""


def _feed(digest: hashlib._Hash, part: bytes) -> None:
    """Add one part, its length first, so that parts cannot run into each other."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical name and shape of every tensor that ``config`` needs, lazily: a garbage layer
    count costs nothing, since the first missing tensor ends the loop."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield EMBEDDING, (config.vocab_size, hidden)
    yield FINAL_NORM, (hidden,)
    if not config.tied_head:
        yield HEAD, (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (q_rows, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_rows, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_rows, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_rows, config.output_bias),
        "mlp.gate_proj": (ffn, hidden, config.mlp_bias),
        "mlp.up_proj": (ffn, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, ffn, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.post_norms:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if config.head_norms:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, width in norms.items():
            yield f"{prefix}{name}.weight", (width,)
        for name, (outputs, inputs, has_bias) in linears.items():
            yield f"{prefix}{name}.weight", (outputs, inputs)
            if has_bias:
                yield f"{prefix}{name}.bias", (outputs,)


def check_config(config: ModelConfig, where: str) -> None:
    """Refuse numbers that no model can have.

    Raises:
        CorruptModel: ``where`` says what file it is about.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is int and not 1 <= value < _MAX_CONFIG_INT:
            raise CorruptModel(f"{where}: {field.name} is {value}")
        if field.type is float and not (math.isfinite(value) and value > 0):
            raise CorruptModel(f"{where}: {field.name} is {value}")
    _check_optional(config, where)
    if config.num_heads % config.num_kv_heads:
        raise CorruptModel(
            f"{where}: {config.num_heads} query heads cannot share {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise CorruptModel(f"{where}: head_dim {config.head_dim} is odd, rope needs pairs")
    bos = () if config.bos_token_id is None else (config.bos_token_id,)
    for token_id in (*bos, *config.eos_token_ids):
        if not 0 <= token_id < config.vocab_size:
            raise CorruptModel(
                f"{where}: special token {token_id} is outside the vocabulary "
                f"of {config.vocab_size}"
            )


def _check_optional(config: ModelConfig, where: str) -> None:
    """Numbers that a model may have none of."""
    scaling = config.rope_scaling
    numbers: dict[str, float | None] = {
        "local_rope_theta": config.local_rope_theta,
        "attention_scale": config.attention_scale,
        "attention_soft_cap": config.attention_soft_cap,
        "logits_soft_cap": config.logits_soft_cap,
        "sliding window": next((w for w in config.windows if w is not None and w < 1), None),
    }
    if scaling is not None:
        if scaling.kind == "divisors" and len(scaling.divisors) != config.head_dim // 2:
            raise CorruptModel(
                f"{where}: {len(scaling.divisors)} rope divisors for heads of {config.head_dim}"
            )
        least = min(scaling.divisors, default=1.0)
        for name in ("factor", "original_positions", "slow", "attention_factor"):
            numbers[f"rope scaling {name}"] = getattr(scaling, name)
        numbers["rope scaling fast - slow"] = scaling.fast - scaling.slow
        numbers["rope divisor"] = least if math.isfinite(sum(scaling.divisors)) else math.inf
        if scaling.kind == "yarn" and config.rope_theta <= 1:
            numbers["rope_theta with yarn"] = math.nan
    for name, value in numbers.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise CorruptModel(f"{where}: {name} is {value}")


def check_tensors(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], where: str
) -> tuple[str, ...]:
    """Names of the tensors that ``config`` needs, all there and of the right shape.

    Args:
        shapes: canonical name -> shape of what the files hold.

    Raises:
        CorruptModel: one is missing or has another shape.
        UnsupportedModel: there is one more, which would be ignored silently.
    """
    needed = []
    for name, shape in expected_shapes(config):
        if name not in shapes:
            raise CorruptModel(f"{where}: tensor {name} is missing")
        if shapes[name] != shape:
            raise CorruptModel(
                f"{where}: tensor {name} has shape {list(shapes[name])}, "
                f"the configuration needs {list(shape)}"
            )
        needed.append(name)
    # Tied checkpoints may carry the head a second time.
    unknown = shapes.keys() - set(needed) - {HEAD}
    if unknown:
        raise UnsupportedModel(
            f"{where}: tensor {min(unknown)} is not part of the {config.family} family as "
            "supported here"
        )
    return tuple(needed)
