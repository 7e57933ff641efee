"""Tiny random Llama models, made by ``transformers`` and written in both formats."""

from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.loaders.llama_files import TOKENS, interleave, stored_name, tokenizer_keys

ROPE_THETA = 7000.0
MAX_POSITIONS = 256


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 3

    def __str__(self) -> str:
        head = "tied" if self.tied else "untied"
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, {head}"


SHAPES = (
    Shape(4, 4, 16, tied=True),
    Shape(4, 2, 32, tied=False),
    Shape(6, 1, 64, tied=True, hidden_size=96),
    Shape(9, 3, 24, tied=False, hidden_size=72),
    Shape(8, 2, 48, tied=True, hidden_size=96),
)


def random_llama(shape: Shape, seed: int = 0) -> LlamaForCausalLM:
    """Weights large enough that logits are of the order of 10 and attention is peaked."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return model


@torch.inference_mode()
def oracle_logits(model: LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """``[tokens, vocab_size]``: of the whole sequence at once."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def write_directory(model: LlamaForCausalLM, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def write_gguf(model: LlamaForCausalLM, shape: Shape, path: Path) -> Path:
    """As F32; q and k interleaved, as the usual converter leaves them."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(MAX_POSITIONS)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(1e-5)
    keys = tokenizer_keys()
    writer.add_tokenizer_model(keys["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(keys["tokenizer.ggml.pre"])
    writer.add_token_list(keys["tokenizer.ggml.tokens"])
    writer.add_token_types(keys["tokenizer.ggml.token_type"])
    writer.add_token_merges(keys["tokenizer.ggml.merges"])
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if name.endswith("q_proj.weight"):
            weight = interleave(weight, shape.num_heads)
        if name.endswith("k_proj.weight"):
            weight = interleave(weight, shape.num_kv_heads)
        writer.add_tensor(stored_name(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
