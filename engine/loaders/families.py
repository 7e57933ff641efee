"""What sets the served families apart, as a table. No torch.

A family is a row: what its Hugging Face class and its GGUF architecture take for granted and do
not write into their files. Called by ``hf_config`` and ``gguf_config``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import CorruptModel

MAX_LAYERS = 4096
"""Of a model with windows, which are listed layer by layer."""


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of decoder."""

    name: str
    """Also GGUF's architecture."""
    model_type: str
    """In config.json; ``architecture`` is what stands beside it."""
    architecture: str
    optional: frozenset[str] = frozenset()
    """Of ``attention_bias``, ``mlp_bias`` and ``sliding_window``: what config.json may turn on."""
    rope_theta: float = 10000.0
    local_rope_theta: float | None = None
    head_dim: int | None = None
    """Where config.json says nothing; None: hidden size / heads."""
    window: int | None = None
    """Where config.json says nothing."""
    full_every: int | None = None
    """Every n-th layer has no window, in either format; None: all have it."""
    has_window_switch: bool = False
    """config.json turns windows on with ``use_sliding_window``, from ``max_window_layers`` on."""
    has_layer_types: bool = True
    """config.json may list which layers have a window."""
    qkv_bias: bool = False
    head_norms: bool = False
    is_gemma: bool = False
    """Post norms, norm weights less one in config.json's checkpoints, scaled embeddings, tanh
    GELU, a scale of scores of its own and a tied head."""
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    wide_scale_layers: int | None = None
    """GGUF does not say that the model of this many layers scales scores by hidden size / heads
    instead of head_dim."""
    interleaves: bool = False
    """GGUF keeps the rows of q and k with the two rotary halves interleaved."""


_BOTH_BIASES = frozenset({"attention_bias", "mlp_bias"})
_ATTENTION = frozenset({"attention_bias", "sliding_window"})

FAMILIES = (
    Family("llama", "llama", "LlamaForCausalLM", _BOTH_BIASES, interleaves=True),
    Family(
        "mistral",
        "mistral",
        "MistralForCausalLM",
        frozenset({"sliding_window"}),
        window=4096,
        has_layer_types=False,
    ),
    Family(
        "qwen2",
        "qwen2",
        "Qwen2ForCausalLM",
        frozenset({"sliding_window"}),
        window=4096,
        has_window_switch=True,
        qkv_bias=True,
    ),
    Family(
        "qwen3",
        "qwen3",
        "Qwen3ForCausalLM",
        _ATTENTION,
        head_dim=128,
        window=4096,
        has_window_switch=True,
        head_norms=True,
    ),
    Family(
        "gemma2",
        "gemma2",
        "Gemma2ForCausalLM",
        _ATTENTION,
        head_dim=256,
        window=4096,
        full_every=2,
        is_gemma=True,
        attention_soft_cap=50.0,
        logits_soft_cap=30.0,
        wide_scale_layers=46,
    ),
    Family(
        "gemma3",
        "gemma3_text",
        "Gemma3ForCausalLM",
        _ATTENTION,
        rope_theta=1e6,
        local_rope_theta=10000.0,
        head_dim=256,
        window=4096,
        full_every=6,
        head_norms=True,
        is_gemma=True,
        wide_scale_layers=62,
    ),
)

BY_MODEL_TYPE: Mapping[str, Family] = {family.model_type: family for family in FAMILIES}
# Mistral's GGUF files call themselves llama.
BY_GGUF_NAME: Mapping[str, Family] = {
    family.name: family for family in FAMILIES if family.name != "mistral"
}


def windows(family: Family, num_layers: int, window: int) -> tuple[int | None, ...]:
    """By the family's own rule: of each layer, its window.

    Raises:
        CorruptModel: more layers than any model has.
    """
    if num_layers > MAX_LAYERS:
        raise CorruptModel(f"num_layers is {num_layers}")
    every = family.full_every
    return tuple(
        None if every is not None and (i + 1) % every == 0 else window for i in range(num_layers)
    )
