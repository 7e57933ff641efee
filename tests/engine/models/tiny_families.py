"""Tiny random models of every family, made by ``transformers`` and written in both formats."""

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.engine.loaders.llama_files import TOKENS, interleave, tokenizer_keys

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 4, 2, 16, 64, 96
MAX_POSITIONS = 256
WINDOW = 24
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
LOCAL = {"rope_type": "default", "rope_theta": 50.0}

# Name of a case -> what is set beside the sizes above.
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA_3},
    "llama, linear": {
        "model_type": "llama",
        "rope_parameters": PLAIN | {"rope_type": "linear"} | {"factor": 3.0},
    },
    "llama, yarn": {"model_type": "llama", "rope_parameters": YARN},
    "llama, biases": {
        "model_type": "llama",
        "rope_parameters": PLAIN,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {"model_type": "mistral", "rope_parameters": PLAIN, "sliding_window": WINDOW},
    "mistral, whole": {"model_type": "mistral", "rope_parameters": PLAIN, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "rope_parameters": YARN},
    "qwen2, windows": {
        "model_type": "qwen2",
        "rope_parameters": PLAIN,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "rope_parameters": PLAIN, "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2",
        "rope_parameters": PLAIN,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": HEAD_DIM,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "gemma2, no caps": {
        "model_type": "gemma2",
        "rope_parameters": PLAIN,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "rope_parameters": {
            "full_attention": PLAIN | {"rope_type": "linear", "factor": 2.0},
            "sliding_attention": LOCAL,
        },
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": HEAD_DIM,
    },
}
# What GGUF cannot say, or says in another way than by keys.
DIRECTORY_ONLY = {"qwen2, windows", "gemma2, no caps"}


def random_model(case: str, seed: int = 0, head_dim: int = HEAD_DIM) -> PreTrainedModel:
    """Weights large enough that logits differ and attention is peaked."""
    torch.manual_seed(seed)
    settings = dict(CASES[case])
    if settings["model_type"].startswith("gemma"):
        # Its norms multiply by one more than their weights, and after every part.
        settings["initializer_range"] = 0.3
    config = AutoConfig.for_model(
        **{
            "vocab_size": len(TOKENS),
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": head_dim,
            "max_position_embeddings": MAX_POSITIONS,
            "initializer_range": 0.2,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": None,
        }
        | settings
    )
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                low = -0.5 if settings["model_type"].startswith("gemma") else 0.5
                parameter.uniform_(low, low + 1.0)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def write_directory(model: PreTrainedModel, path: Path) -> Path:
    """As ``transformers`` writes it, in several files."""
    model.save_pretrained(path, max_shard_size="60KB")
    return path


def write_gguf(model: PreTrainedModel, case: str, path: Path) -> Path:
    """As F32, with the keys that the usual converter writes."""
    settings = CASES[case]
    name = {"mistral": "llama", "gemma3_text": "gemma3"}.get(
        settings["model_type"], settings["model_type"]
    )
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(LAYERS)
    writer.add_context_length(MAX_POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    _add_rope(writer, name, settings["rope_parameters"])
    if settings.get("sliding_window"):
        writer.add_sliding_window(WINDOW)
    if "sliding_window_pattern" in settings:
        writer.add_uint32(f"{name}.attention.sliding_window_pattern", 3)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(settings["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(settings["final_logit_softcapping"])
    keys = tokenizer_keys()
    writer.add_tokenizer_model(keys["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(keys["tokenizer.ggml.pre"])
    writer.add_token_list(keys["tokenizer.ggml.tokens"])
    writer.add_token_types(keys["tokenizer.ggml.token_type"])
    writer.add_token_merges(keys["tokenizer.ggml.merges"])
    names = gguf.get_tensor_name_map(_architecture(name), LAYERS)
    for tensor_name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if name == "llama" and ".q_proj." in tensor_name:
            weight = _interleaved(weight, HEADS)
        if name == "llama" and ".k_proj." in tensor_name:
            weight = _interleaved(weight, KV_HEADS)
        if name.startswith("gemma") and tensor_name.endswith("norm.weight"):
            weight = weight + 1
        writer.add_tensor(names.get_name(tensor_name, (".weight", ".bias")), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope(writer: gguf.GGUFWriter, name: str, rope: dict[str, Any]) -> None:
    if "full_attention" in rope:
        writer.add_float32(f"{name}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(rope))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _divisors(rope: dict[str, Any]) -> Any:
    """As the converter of Llama 3 writes them: 1, the factor, and between."""
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    turns = rope["original_max_position_embeddings"] * plain / (2 * torch.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (turns - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    scaled = torch.where(turns < low, rope["factor"], torch.where(turns > high, 1.0, between))
    return scaled.float().numpy()


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _interleaved(weight: Any, heads: int) -> Any:
    if weight.ndim == 1:
        return interleave(weight[:, None], heads)[:, 0].copy()
    return interleave(weight, heads)
