"""The rotary part of a config.json, in any of the places and forms in which it has been written.

No torch. Called by ``hf_config``.
"""

import math
from typing import NamedTuple

from engine.config import RopeScaling
from engine.errors import CorruptModel, UnsupportedModel
from engine.loaders.families import Family
from engine.loaders.hf_fields import Fields


class RopeFields(NamedTuple):
    """``ModelConfig``'s fields on positions."""

    theta: float
    local_theta: float | None
    scaling: RopeScaling | None
    max_positions: int


def rope_fields(fields: Fields, family: Family) -> RopeFields:
    """Read them.

    Raises:
        UnsupportedModel: a kind of scaling that is not computed here.
        CorruptModel: numbers are missing or of the wrong type.
    """
    parameters = fields.section("rope_parameters")
    old = fields.section("rope_scaling")
    local = Fields({}, fields.where)
    if family.local_rope_theta is not None:
        # New files have a section for each kind of layer.
        local = parameters.section("sliding_attention")
        if "full_attention" in parameters.values:
            parameters = parameters.section("full_attention")
    for section in (fields, parameters, old, local):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(f"{fields.where}: partial rotary embedding is not supported")
    if _kind(local) != "default":
        raise UnsupportedModel(f"{local.where}: scaling of layers with windows is not supported")
    theta = parameters.number("rope_theta", fields.number("rope_theta", family.rope_theta))
    local_theta = family.local_rope_theta
    if local_theta is not None:
        local_theta = local.number("rope_theta", fields.number("rope_local_base_freq", local_theta))
    max_positions = fields.integer("max_position_embeddings", 2048)
    scaled = parameters if _kind(parameters) != "default" else old
    scaling = _scaling(scaled, max_positions)
    if scaling is not None and scaling.kind == "yarn":
        # Some files name the context before it is stretched.
        longest = scaling.original_positions * scaling.factor
        if 0 < longest < math.inf:
            max_positions = max(max_positions, int(longest))
    return RopeFields(theta, local_theta, scaling, max_positions)


def _kind(section: Fields) -> str:
    kind = section.values.get("rope_type") or section.values.get("type") or "default"
    if not isinstance(kind, str):
        raise CorruptModel(f"{section.where}: rope_type is not a string")
    return kind


def _scaling(section: Fields, max_positions: int) -> RopeScaling | None:
    match _kind(section):
        case "default":
            return None
        case "dynamic":
            # Up to max_position_embeddings nothing is stretched; beyond it: ModelConfig.stretched.
            return RopeScaling("dynamic", section.number("factor"), max_positions)
        case "linear":
            return RopeScaling("linear", section.number("factor"))
        case "llama3":
            return RopeScaling(
                "llama3",
                section.number("factor"),
                section.integer("original_max_position_embeddings", max_positions),
                slow=section.number("low_freq_factor"),
                fast=section.number("high_freq_factor"),
            )
        case "yarn":
            return _yarn(section, max_positions)
    raise UnsupportedModel(f"{section.where}: rope scaling {_kind(section)!r:.40} is not supported")


def _yarn(section: Fields, max_positions: int) -> RopeScaling:
    original = section.integer("original_max_position_embeddings", max_positions)
    if original < 1:
        raise CorruptModel(f"{section.where}: original_max_position_embeddings is {original}")
    factor = section.number("factor", max_positions / original)
    attention = section.optional_number("attention_factor")
    if attention is None:
        scale, all_dims = (section.optional_number(n) for n in ("mscale", "mscale_all_dim"))
        attention = (
            yarn_attention_factor(factor, scale) / yarn_attention_factor(factor, all_dims)
            if scale and all_dims
            else yarn_attention_factor(factor)
        )
    return RopeScaling(
        "yarn",
        factor,
        original,
        slow=section.number("beta_slow", 1.0),
        fast=section.number("beta_fast", 32.0),
        attention_factor=attention,
        truncate=section.flag("truncate", True),
    )


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """The paper's: 0.1 ln(factor) + 1."""
    return 1.0 if not factor > 1 else 0.1 * scale * math.log(factor) + 1.0
