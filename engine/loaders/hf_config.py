"""config.json of a Hugging Face Llama to ``ModelConfig``. No torch.

What the family allows but is not computed here (biases, rope scaling, sliding windows) is refused
by name, never ignored. Called by ``hf_directory`` and ``hf_tokenizer``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import ModelConfig
from engine.errors import CorruptModel, ModelNotFound, UnsupportedModel
from engine.loaders.files import check_config

_MAX_JSON_BYTES = 256 << 20
_MUST_BE_OFF = ("attention_bias", "mlp_bias", "sliding_window", "quantization_config")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelNotFound: the file cannot be read.
        CorruptModel: it is not a JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CorruptModel(f"{path.name} is larger than any such file")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path.name} is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(value, dict):
        raise CorruptModel(f"{path.name} is not a JSON object")
    return value


def config_from_json(directory: Path) -> ModelConfig:
    """Read config.json, and generation_config.json for more end tokens.

    Raises:
        UnsupportedModel: another family, or a feature that is not computed here.
        CorruptModel: fields are missing, of the wrong type, or impossible.
    """
    fields = _Fields(read_object(directory / "config.json"), f"{directory.name}/config.json")
    _refuse_variants(fields)
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if num_heads < 1:
        raise CorruptModel(f"{fields.where}: num_attention_heads is {num_heads}")
    eos = fields.token_ids("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.is_file():
        more = _Fields(read_object(generation), f"{directory.name}/{generation.name}")
        eos = tuple(dict.fromkeys((*eos, *more.token_ids("eos_token_id"))))
    bos = fields.token_ids("bos_token_id")
    config = ModelConfig(
        family="llama",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden // num_heads),
        max_positions=fields.integer("max_position_embeddings", 2048),
        rope_theta=_rope_theta(fields),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied_head=fields.flag("tie_word_embeddings", False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
    )
    check_config(config, fields.where)
    return config


class _Fields:
    """Typed access to a JSON object. A null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(name, "an integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(name, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self._wrong_type(name, "a number of ordinary size") from None

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong_type(name, "a boolean")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of them, or nothing."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self._wrong_type(name, "a token id or a list of them")
        return tuple(ids)

    def section(self, name: str) -> "_Fields":
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self._wrong_type(name, "an object")
        return _Fields(value, f"{self.where}: {name}")

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise CorruptModel(f"{self.where}: {name} is missing")
        return value

    def _wrong_type(self, name: str, wanted: str) -> CorruptModel:
        return CorruptModel(f"{self.where}: {name} is not {wanted}")


def _refuse_variants(fields: _Fields) -> None:
    family = fields.values.get("model_type")
    if family != "llama":
        raise UnsupportedModel(
            f"{fields.where}: models of the family {family!r:.80} are not supported, only llama"
        )
    architectures = fields.values.get("architectures") or ["LlamaForCausalLM"]
    if architectures != ["LlamaForCausalLM"]:
        raise UnsupportedModel(
            f"{fields.where}: architectures is {architectures!r:.80}, not ['LlamaForCausalLM']"
        )
    for name in _MUST_BE_OFF:
        if fields.values.get(name):
            raise UnsupportedModel(f"{fields.where}: {name} is not supported")
    if (activation := fields.values.get("hidden_act") or "silu") != "silu":
        raise UnsupportedModel(f"{fields.where}: hidden_act {activation!r:.40} is not supported")


def _rope_theta(fields: _Fields) -> float:
    """Base of the rotary frequencies, from any of the places where it has been written."""
    parameters, scaling = fields.section("rope_parameters"), fields.section("rope_scaling")
    for section in (parameters, scaling):
        kind = section.values.get("rope_type") or section.values.get("type") or "default"
        if kind != "default":
            raise UnsupportedModel(f"{fields.where}: rope scaling {kind!r:.40} is not supported")
    for section in (fields, parameters, scaling):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(f"{fields.where}: partial rotary embedding is not supported")
    return parameters.number("rope_theta", fields.number("rope_theta", 10000.0))
