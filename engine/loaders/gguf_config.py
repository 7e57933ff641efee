"""Keys of a GGUF file to ``ModelConfig``. No torch.

What a family allows but is not computed here is refused by name, never ignored. Called by
``gguf_model``.
"""

import dataclasses
from typing import Any

import numpy as np

from engine.config import ModelConfig, RopeScaling
from engine.errors import CorruptModel, UnsupportedModel
from engine.loaders.families import BY_GGUF_NAME, Family, windows
from engine.loaders.files import check_config
from engine.loaders.gguf_file import GgufFile
from engine.loaders.hf_rope import yarn_attention_factor

ROPE_DIVISORS = "rope_freqs.weight"
"""A constant in the guise of a tensor: Llama 3's stretching of frequencies."""


def config_from_gguf(file: GgufFile) -> tuple[Family, ModelConfig]:
    """Read it.

    Raises:
        UnsupportedModel: another family, or a feature that is not computed here.
        CorruptModel: keys are missing, of the wrong type, or impossible.
    """
    name = file.text("general.architecture")
    family = BY_GGUF_NAME.get(name)
    if family is None:
        raise UnsupportedModel(
            f"{file.path.name}: models of the family {name!r:.80} are not supported, only "
            + ", ".join(BY_GGUF_NAME)
        )
    _refuse_variants(file, name)
    hidden = file.integer(f"{name}.embedding_length")
    num_heads = file.integer(f"{name}.attention.head_count")
    if num_heads < 1:
        raise CorruptModel(f"{file.path.name}: num_heads is {num_heads}")
    head_dim = file.integer(f"{name}.attention.key_length", hidden // num_heads)
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        if file.integer(key, head_dim) != head_dim:
            raise UnsupportedModel(
                f"{file.path.name}: {key} differs from the head size {head_dim}; not supported"
            )
    config = ModelConfig(
        family=name,
        vocab_size=len(file.texts("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=file.integer(f"{name}.feed_forward_length"),
        num_layers=file.integer(f"{name}.block_count"),
        num_heads=num_heads,
        num_kv_heads=file.integer(f"{name}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_positions=file.integer(f"{name}.context_length"),
        rope_theta=file.number(f"{name}.rope.freq_base", family.rope_theta),
        rms_norm_eps=file.number(f"{name}.attention.layer_norm_rms_epsilon"),
        tied_head="output.weight" not in file.tensors,
        bos_token_id=_optional_integer(file, "tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(file),
        rope_scaling=_rope_scaling(file, name),
        local_rope_theta=_local_rope_theta(file, family),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        head_norms=family.head_norms,
    )
    config = dataclasses.replace(config, windows=_windows(file, family, config.num_layers))
    if family.is_gemma:
        config = dataclasses.replace(config, **_gemma(file, family, config))
    check_config(config, file.path.name)
    return family, config


def _refuse_variants(file: GgufFile, name: str) -> None:
    """Refuse what the architecture name does not tell and would compute wrong silently."""
    where = file.path.name
    if file.integer("split.count", 1) > 1:
        raise UnsupportedModel(f"{where}: a GGUF split over several files; merge it into one")
    if file.integer(f"{name}.expert_count", 0):
        raise UnsupportedModel(f"{where}: mixture of experts is not supported")


def _rope_scaling(file: GgufFile, name: str) -> RopeScaling | None:
    old_factor = file.number(f"{name}.rope.scale_linear", 0.0)
    factor = file.number(f"{name}.rope.scaling.factor", old_factor)
    # Where no kind is named, a factor is linear.
    kind = file.text(f"{name}.rope.scaling.type", "linear")
    if ROPE_DIVISORS in file.tensors:
        return RopeScaling("divisors", divisors=_divisors(file))
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind != "yarn" or f"{name}.rope.scaling.yarn_log_multiplier" in file.keys:
        raise UnsupportedModel(f"{file.path.name}: rope scaling {kind!r:.40} is not supported")
    attention = file.number(f"{name}.rope.scaling.attn_factor", 1.0)
    return RopeScaling(
        "yarn",
        factor,
        file.integer(
            f"{name}.rope.scaling.original_context_length", file.integer(f"{name}.context_length")
        ),
        slow=file.number(f"{name}.rope.scaling.yarn_beta_slow", 1.0),
        fast=file.number(f"{name}.rope.scaling.yarn_beta_fast", 32.0),
        attention_factor=attention * yarn_attention_factor(factor),
    )


def _divisors(file: GgufFile) -> tuple[float, ...]:
    tensor = file.tensors[ROPE_DIVISORS]
    if tensor.type_name != "F32" or len(tensor.shape) != 1:
        raise CorruptModel(f"{file.path.name}: {ROPE_DIVISORS} is not a row of F32")
    return tuple(file.blocks(tensor).copy().view(np.float32).tolist())


def _local_rope_theta(file: GgufFile, family: Family) -> float | None:
    if family.local_rope_theta is None:
        return None
    return file.number(f"{family.name}.rope.freq_base_swa", family.local_rope_theta)


def _windows(file: GgufFile, family: Family, num_layers: int) -> tuple[int | None, ...]:
    default = family.window or 0 if family.is_gemma else 0
    window = file.integer(f"{family.name}.attention.sliding_window", default)
    if window == 0:
        return ()
    key = f"{family.name}.attention.sliding_window_pattern"
    if key not in file.keys:
        return windows(family, num_layers, window)
    if isinstance(file.keys[key].value, int) and family.full_every is not None:
        every = file.integer(key)
        if every < 1:
            raise CorruptModel(f"{file.path.name}: key {key} is {every}")
        return windows(dataclasses.replace(family, full_every=every), num_layers, window)
    pattern = file.numbers(key).tolist()
    if len(pattern) != num_layers:
        raise CorruptModel(f"{file.path.name}: {len(pattern)} in {key}, {num_layers} layers")
    return tuple(window if has_window else None for has_window in pattern)


def _gemma(file: GgufFile, family: Family, config: ModelConfig) -> dict[str, Any]:
    """Names of ``ModelConfig``'s fields."""
    name, wide = family.name, config.num_layers == family.wide_scale_layers
    caps = {
        "attention_soft_cap": (f"{name}.attn_logit_softcapping", family.attention_soft_cap),
        "logits_soft_cap": (f"{name}.final_logit_softcapping", family.logits_soft_cap),
    }
    return {
        **{
            field: (file.number(key) or None) if key in file.keys else default
            for field, (key, default) in caps.items()
        },
        "attention_scale": (config.hidden_size / config.num_heads) ** -0.5 if wide else None,
        "embedding_scale": float(config.hidden_size) ** 0.5,
        "activation": "gelu",
        "post_norms": True,
    }


def _optional_integer(file: GgufFile, name: str) -> int | None:
    return file.integer(name) if name in file.keys else None


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """End of text, of turn and of message: whichever the file names, each once."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (_optional_integer(file, f"tokenizer.ggml.{name}") for name in names)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))
