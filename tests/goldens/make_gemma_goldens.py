"""Write ``gemma3_greedy_float32.json``: Gemma 3's greedy answers by ``transformers``.

Run by hand (``python -m tests.goldens.make_gemma_goldens``, some minutes). The oracle is
``Gemma3ForCausalLM`` with eager attention in float32, from a config written out here by hand and
the state dict of ``transformers``' own GGUF reader: nothing of our loader or our reading of keys
is in it, but token ids, which tests hold against plain rules.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.loaders.open import open_model
from tests.goldens.gemma import HOW_TO_INSTALL, assemble, find_parts
from tests.goldens.oracle import greedy
from tests.goldens.prompts import PROMPTS

GOLDENS = Path(__file__).with_name("gemma3_greedy_float32.json")
NUM_PROMPTS, NUM_TOKENS = 8, 24
# Of the longest prompt: past the window of 512 tokens.
WINDOW_PROMPT_TOKENS = 700
LEAST_GAP = 1e-3


def oracle(gguf: Path) -> Gemma3ForCausalLM:
    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        sliding_window=512,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
    )
    model = Gemma3ForCausalLM(config).eval()
    state = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model


def texts() -> dict[str, str]:
    """The shorter ones of the demo's texts, and one past the window."""
    plain = {prompt.name: prompt.text for prompt in PROMPTS if prompt.text}
    by_length = sorted(plain, key=lambda name: len(plain[name]))
    return {name: plain[name] for name in [by_length[-1], *by_length[:-1]]}


def main() -> int:
    torch.set_num_threads(1)
    parts = find_parts()
    assert parts, HOW_TO_INSTALL
    with tempfile.TemporaryDirectory() as folder:
        gguf = assemble(parts, Path(folder) / "gemma.gguf")
        tokenizer = open_model(str(gguf)).tokenizer()
        model = oracle(gguf)
    entries = []
    for name, text in texts().items():
        ids = tokenizer.encode(text)[:WINDOW_PROMPT_TOKENS]
        output, gaps = greedy(model, ids, NUM_TOKENS)
        print(f"{name}: {len(ids)} tokens, least gap {min(gaps)}", file=sys.stderr)
        if min(gaps) < LEAST_GAP:
            continue  # a near tie would make a test a matter of luck
        prompt = tokenizer.decode(ids[1:], skip_special_tokens=False)
        assert tokenizer.encode(prompt) == ids, name
        entry = {"name": name, "prompt": prompt, "prompt_token_ids": ids}
        entries.append(entry | {"output_token_ids": output, "gaps": gaps})
        if len(entries) == NUM_PROMPTS:
            break
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    GOLDENS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
