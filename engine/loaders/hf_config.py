"""config.json of a Hugging Face model to ``ModelConfig``. No torch.

What a family allows but is not computed here is refused by name, never ignored. Called by
``hf_directory``.
"""

import dataclasses
from pathlib import Path
from typing import Any

from engine.config import ModelConfig
from engine.errors import CorruptModel, UnsupportedModel
from engine.loaders.families import BY_MODEL_TYPE, Family, windows
from engine.loaders.files import check_config
from engine.loaders.hf_fields import Fields, read_object
from engine.loaders.hf_rope import rope_fields

_OPTIONAL = ("attention_bias", "mlp_bias", "sliding_window")
_MUST_BE_OFF = ("quantization_config", "use_bidirectional_attention")
_ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
}


def config_from_json(directory: Path) -> ModelConfig:
    """Read config.json, and generation_config.json for more end tokens.

    Raises:
        UnsupportedModel: another family, or a feature that is not computed here.
        CorruptModel: fields are missing, of the wrong type, or impossible.
    """
    fields = Fields(read_object(directory / "config.json"), f"{directory.name}/config.json")
    family = _family(fields)
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if num_heads < 1:
        raise CorruptModel(f"{fields.where}: num_attention_heads is {num_heads}")
    eos = fields.token_ids("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.is_file():
        more = Fields(read_object(generation), f"{directory.name}/{generation.name}")
        eos = tuple(dict.fromkeys((*eos, *more.token_ids("eos_token_id"))))
    bos = fields.token_ids("bos_token_id")
    rope = rope_fields(fields, family)
    config = ModelConfig(
        family=family.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", family.head_dim or hidden // num_heads),
        max_positions=rope.max_positions,
        rope_theta=rope.theta,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied_head=fields.flag("tie_word_embeddings", family.is_gemma),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        rope_scaling=rope.scaling,
        local_rope_theta=rope.local_theta,
        activation=_activation(fields, family),
        **_biases(fields, family),
        head_norms=family.head_norms,
    )
    config = dataclasses.replace(config, windows=_windows(fields, family, config.num_layers))
    if family.is_gemma:
        config = dataclasses.replace(config, **_gemma(fields, family, config))
    check_config(config, fields.where)
    return config


def _family(fields: Fields) -> Family:
    """Raises: UnsupportedModel: none of the table, or with something that is not computed."""
    model_type = fields.values.get("model_type")
    family = BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModel(
            f"{fields.where}: models of the family {model_type!r:.80} are not supported, only "
            + ", ".join(BY_MODEL_TYPE)
        )
    architectures = fields.values.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise UnsupportedModel(
            f"{fields.where}: architectures is {architectures!r:.80}, not {[family.architecture]}"
        )
    foreign = (name for name in _OPTIONAL if name not in family.optional)
    for name in (*_MUST_BE_OFF, *foreign):
        if fields.values.get(name):
            raise UnsupportedModel(f"{fields.where}: {name} is not supported")
    return family


def _activation(fields: Fields, family: Family) -> str:
    name = "hidden_activation" if family.is_gemma else "hidden_act"
    # Gemma's first files say gelu and mean its tanh form.
    value = fields.values.get(name) or ("gelu_pytorch_tanh" if family.is_gemma else "silu")
    if value not in _ACTIVATIONS:
        raise UnsupportedModel(f"{fields.where}: {name} {value!r:.40} is not supported")
    return _ACTIVATIONS[value]


def _biases(fields: Fields, family: Family) -> dict[str, Any]:
    """Names of ``ModelConfig``'s fields; what the family does not allow has been refused."""
    attention = fields.flag("attention_bias", False)
    return {
        "qkv_bias": attention or family.qkv_bias,
        "output_bias": attention,
        "mlp_bias": fields.flag("mlp_bias", False),
    }


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    if "sliding_window" not in family.optional:
        return ()
    # A null is no window; only where the name is absent does the family's own number count.
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return ()
    if family.has_window_switch and not fields.flag("use_sliding_window", False):
        return ()
    window = fields.integer("sliding_window", family.window)
    types = fields.texts("layer_types") if family.has_layer_types else []
    if types:
        if len(types) != num_layers:
            raise CorruptModel(f"{fields.where}: {len(types)} layer_types, {num_layers} layers")
        kinds = {"sliding_attention": window, "full_attention": None}
        if unknown := set(types) - kinds.keys():
            raise UnsupportedModel(f"{fields.where}: layer type {min(unknown)!r:.40}")
        return tuple(kinds[kind] for kind in types)
    if family.full_every is not None:
        every = fields.integer("sliding_window_pattern", family.full_every)
        if every < 1:
            raise CorruptModel(f"{fields.where}: sliding_window_pattern is {every}")
        family = dataclasses.replace(family, full_every=every)
    listed = windows(family, num_layers, window)
    if family.has_window_switch:
        first = fields.integer("max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(len(listed)))
    return listed


def _gemma(fields: Fields, family: Family, config: ModelConfig) -> dict[str, Any]:
    """Names of ``ModelConfig``'s fields."""
    scalar = fields.number("query_pre_attn_scalar", 256.0)
    if not scalar > 0:
        raise CorruptModel(f"{fields.where}: query_pre_attn_scalar is {scalar}")
    caps = {
        "attention_soft_cap": ("attn_logit_softcapping", family.attention_soft_cap),
        "logits_soft_cap": ("final_logit_softcapping", family.logits_soft_cap),
    }
    return {
        # A null is no cap.
        **{
            field: fields.optional_number(name) if name in fields.values else default
            for field, (name, default) in caps.items()
        },
        "attention_scale": None if scalar == config.head_dim else scalar**-0.5,
        "embedding_scale": float(config.hidden_size) ** 0.5,
        "post_norms": True,
        "norms_add_one": True,
    }
