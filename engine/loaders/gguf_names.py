"""GGUF's names of tensors to Hugging Face's. Called by ``gguf_model``."""

import re

_WHOLE_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {"ffn_norm": "post_attention_layernorm"}
_NORMS_WITH_POST = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER = re.compile(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)")


def canonical(name: str, post_norms: bool) -> str:
    """The Hugging Face name; a name that has none is returned as it is and refused later.

    Args:
        post_norms: what attention and MLP give is normed: the MLP's own norm is then called
            otherwise.
    """
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _WHOLE_NAMES.get(name, name)
    number, stored, kind = layer.groups()
    part = (_PARTS | (_NORMS_WITH_POST if post_norms else _NORMS)).get(stored)
    return name if part is None else f"model.layers.{int(number)}.{part}.{kind}"
