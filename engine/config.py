"""Frozen configuration of a model and of an engine. No torch, no I/O.

A docstring per field: the command line takes its help and its defaults from here.
"""

from dataclasses import dataclass

from kvtransfer.layout import KvLayout


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder-only transformer of the Llama family."""

    family: str
    """``llama``: the only one so far."""
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

    def kv_layout(self, dtype: str, block_size: int) -> KvLayout:
        """The KV layout of this model in ``dtype``, row order."""
        return KvLayout(dtype, self.num_layers, self.num_kv_heads, self.head_dim, block_size)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine is built with."""

    device: str = "auto"
    """Where to compute: auto, cpu or cuda."""
    dtype: str = "auto"
    """KV and compute type: auto, float32 or bfloat16. auto: what the weights go with."""
    weights: str = "auto"
    """Numeric recipe of the weights: auto, float32, bf16, int8 or file (the GGUF's own blocks)."""
    kernels: str = "auto"
    """What computes: auto (native where it can) or torch."""
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
