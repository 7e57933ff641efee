"""Small Llama files of every stored type, written by the libraries of others.

Weights have Hugging Face names and order; the GGUF writer here interleaves q and k as the usual
converter does, so that undoing it is tested against the original.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
SPECIAL = ["<|bos|>", "<|eos|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*ALPHABET, *SPECIAL, "ab", "abc", "Ġa"]
MERGES = ["a b", "ab c", "Ġ a"]
BOS, EOS = 256, 257

Weights = dict[str, npt.NDArray[np.float32]]

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_weights(seed: int = 0, tied: bool = True) -> Weights:
    """A Llama of the sizes above."""
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return draw.standard_normal(shape).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": normal(len(TOKENS), HIDDEN),
        "model.norm.weight": normal(HIDDEN),
    }
    if not tied:
        weights["lm_head.weight"] = normal(len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes = {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }
        weights |= {f"{prefix}{name}.weight": normal(*shape) for name, shape in shapes.items()}
    return weights


def stored_name(name: str) -> str:
    """GGUF's name of a tensor."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"


def interleave(weight: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of each head in pairs (half 0, half 1)."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def write_gguf(
    path: Path,
    weights: Weights,
    types: Mapping[str, str] | None = None,
    default_type: str = "F32",
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model.

    Args:
        types: Hugging Face name -> stored type; one-dimensional tensors are F32 else.
        keys: change keys, or drop them with None.
    """
    values = {**model_keys(), **tokenizer_keys(), **(keys or {})}
    writer = gguf.GGUFWriter(path, str(values.pop("general.architecture")))
    for name, value in values.items():
        _add_key(writer, name, value)
    for name, weight in weights.items():
        type_name = (types or {}).get(name, default_type if weight.ndim > 1 else "F32")
        _add_tensor(writer, name, weight, type_name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_keys() -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 5000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }


def tokenizer_keys() -> dict[str, Any]:
    control = gguf.TokenType.CONTROL.value
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [control if t in SPECIAL else 1 for t in TOKENS],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": True,
    }


def _add_key(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, weight: npt.NDArray[np.float32], type_name: str
) -> None:
    if name.endswith("q_proj.weight"):
        weight = interleave(weight, HEADS)
    if name.endswith("k_proj.weight"):
        weight = interleave(weight, KV_HEADS)
    kind = gguf.GGMLQuantizationType[type_name]
    writer.add_tensor(stored_name(name), gguf.quantize(weight, kind), raw_dtype=kind)
