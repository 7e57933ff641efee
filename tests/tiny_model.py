"""A tiny random Llama with a byte-level tokenizer and a chat template, as a Hugging Face directory.

Answers nonsense fast, but through the same code as a real model: for tests of everything around it.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, CONTEXT = 64, 3, 4, 2, 16, 128, 2048
SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_model(directory: Path, seed: int = 0, num_layers: int = LAYERS) -> Path:
    """Write the model; the same ``seed`` gives the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = _write_tokenizer(directory)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(vocab_size, num_layers, seed), directory / "model.safetensors")
    return directory


def _write_tokenizer(directory: Path) -> int:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


def _weights(vocab_size: int, num_layers: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    weights = {
        "model.embed_tokens.weight": normal(vocab_size, HIDDEN, scale=1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(vocab_size, HIDDEN),
    }
    for i in range(num_layers):
        p = f"model.layers.{i}."
        weights |= {
            p + "input_layernorm.weight": torch.ones(HIDDEN),
            p + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            p + "self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            p + "mlp.gate_proj.weight": normal(FFN, HIDDEN),
            p + "mlp.up_proj.weight": normal(FFN, HIDDEN),
            p + "mlp.down_proj.weight": normal(HIDDEN, FFN),
        }
    return weights
