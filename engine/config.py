"""Frozen configuration of a model and of an engine. No torch, no I/O.

A docstring per field: the command line takes its help and its defaults from here.
"""

from dataclasses import dataclass, replace

from kvtransfer.layout import KvLayout


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched to contexts longer than the first training's."""

    kind: str
    """linear, yarn (https://arxiv.org/abs/2309.00071), llama3, dynamic, or divisors."""
    factor: float = 1.0
    """How much longer."""
    original_positions: int = 1
    """Context of the first training, in tokens: yarn, llama3 and dynamic."""
    slow: float = 1.0
    """Frequencies that turn less often than this within it are stretched wholly."""
    fast: float = 32.0
    """Frequencies that turn more often are left alone; in between, both are blended."""
    attention_factor: float = 1.0
    """Multiplies cosines and sines."""
    truncate: bool = True
    """yarn: the blend begins and ends at whole dimensions."""
    divisors: tuple[float, ...] = ()
    """Of each frequency, as the file gives them: [head_dim / 2]."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder-only transformer: all that sets one family apart from
    another is data here."""

    family: str
    """llama, mistral, qwen2, qwen3, gemma2 or gemma3; tells a reader, decides nothing."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    """Longest context the model was trained for, in tokens."""
    rope_theta: float
    rms_norm_eps: float
    tied_head: bool
    """The output head is the embedding matrix."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    rope_scaling: RopeScaling | None = None
    """Of the layers without a rope base of their own."""
    local_rope_theta: float | None = None
    """Rope base of the layers with a window, never stretched; None: ``rope_theta``."""
    windows: tuple[int | None, ...] = ()
    """Of each layer: how many positions a row sees, its own included; None: all. Empty: all
    layers see all."""
    attention_scale: float | None = None
    """Multiplies scores; None: head_dim ** -0.5."""
    attention_soft_cap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    activation: str = "silu"
    """Of the gate: silu, or gelu (its tanh form)."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Of attention's output projection."""
    mlp_bias: bool = False
    head_norms: bool = False
    """Every query and key head is normed before it is rotated."""
    post_norms: bool = False
    """What attention and MLP give is normed before it is added."""
    norms_add_one: bool = False
    """Norm weights are stored less one."""

    @property
    def longest_context(self) -> int:
        """The most that can be asked for, in tokens; see ``stretched``."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "dynamic":
            return self.max_positions
        return max(self.max_positions, int(scaling.original_positions * scaling.factor))

    def stretched(self, max_context: int) -> "ModelConfig":
        """The model as it is computed where contexts may be so long.

        Dynamic scaling takes its frequencies from a length. Transformers takes that of each
        sequence, so that a token's KV would change as the sequence grows; here it is that of the
        longest one, for all. Up to the length of the first training nothing is stretched.
        """
        if self.max_positions < max_context <= self.longest_context:
            return replace(self, max_positions=max_context)
        return self

    def window(self, layer: int) -> int | None:
        """See ``windows``."""
        return self.windows[layer] if self.windows else None

    def has_local_rope(self, layer: int) -> bool:
        """Whether this layer rotates by ``local_rope_theta``."""
        return self.local_rope_theta is not None and self.window(layer) is not None

    def kv_layout(self, dtype: str, block_size: int) -> KvLayout:
        """The KV layout of this model in ``dtype``, row order."""
        return KvLayout(dtype, self.num_layers, self.num_kv_heads, self.head_dim, block_size)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine is built with."""

    device: str = "auto"
    """Where to compute: auto, cpu or cuda."""
    dtype: str = "auto"
    """Compute type: auto, float32 or bfloat16. auto: what the weights go with."""
    kv_dtype: str = "auto"
    """What KV is kept as: auto (as it is computed) or int8 (half of bfloat16, with a scale for
    every token and head)."""
    weights: str = "auto"
    """Numeric recipe of the weights: auto, float32, bf16, int8 or file (the GGUF's own blocks)."""
    kernels: str = "auto"
    """What computes: auto (native where it can) or torch."""
    deterministic: bool = False
    """Start only where an answer's bits do not depend on what else is computed with it: on the
    native kernels, in every recipe."""
    block_size: int = 16
    """Tokens in a KV block."""
    kv_cache_bytes: int = 0
    """KV memory of an instance; 0: an eighth of the machine's memory, at most 1 GiB."""
    max_context: int = 0
    """Longest prompt + answer in tokens; 0: what the model was trained for."""
    threads: int = 1
    """Compute threads of an instance."""
    schedule: str = "decode_first"
    """Who goes first: decode_first (every step carries all decodes, prompts fill the rest) or
    prefill_first (steps of prompts alone while some wait, then one of all decodes)."""
    token_budget: int = 2048
    """Most tokens in one step."""
    max_prefill_batch: int = 64
    """Most prompts in one step."""
    max_consecutive_prefill_steps: int = 4
    """With prefill_first: most steps of prompts alone while a decode waits."""
    max_decode_sequences: int = 64
    """Most sequences decoding at once."""
    max_step_s: float = 0.2
    """On CPU a step's prefill chunk is sized to take at most this long, in seconds."""
    max_gap_s: float = 0.03
    """The same for a step that also carries decodes: a chunk delays their next token."""
    prefix_cache: bool = True
    """Reuse the KV of equal prompt beginnings."""
