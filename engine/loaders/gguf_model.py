"""A Llama model in a GGUF file: its configuration, tensors and their order. No torch at import.

GGUF keeps the rows of q and k with the two rotary halves interleaved; ``tensor`` undoes that,
``raw`` hands out the file's own blocks for kernels that compute on them. Called by ``open``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.config import ModelConfig
from engine.errors import CorruptModel, UnsupportedModel
from engine.loaders.files import ModelFiles, check_config, check_tensors
from engine.loaders.gguf_file import GgufFile
from engine.loaders.gguf_tokenizer import tokenizer_from_gguf
from engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

_SANE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_QUANTISATION_SUFFIX = re.compile(r"[.-](?:i?q\d\w*|b?f16|f32)$", re.IGNORECASE)

_WHOLE_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")


class GgufModel(ModelFiles):
    """One GGUF file.

    Raises:
        ModelNotFound, CorruptModel, UnsupportedModel: see ``open_model``.
    """

    def __init__(self, path: Path, aliases: tuple[str, ...] = ()) -> None:
        self.path = path
        self._file = GgufFile(path)
        config = _config(self._file)
        super().__init__(_model_id(self._file), aliases, config)
        self._stored_names = {_canonical(name): name for name in self._file.tensors}
        shapes = {
            name: self._file.tensors[stored].shape for name, stored in self._stored_names.items()
        }
        self._names = check_tensors(config, shapes, path.name)
        for tensor in self._file.tensors.values():
            self._file.blocks(tensor)  # checks type and bounds, reads nothing

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self._file, self.config)

    def tensor_names(self) -> tuple[str, ...]:
        return self._names

    def tensor(self, name: str, dtype: str) -> torch.Tensor:
        from engine.loaders.dequantize import to_tensor

        blocks, type_name, shape = self.raw(name)
        tensor = to_tensor(blocks, type_name, shape, dtype)
        order = self.row_order(name)
        if order is None:
            return tensor
        import torch

        return tensor.index_select(0, torch.from_numpy(order))

    def raw(self, name: str) -> tuple[npt.NDArray[np.uint8], str, tuple[int, ...]]:
        """The file's own blocks: mapped bytes, GGUF type name, shape.

        Rows are in the file's order; for q and k, ``row_order`` tells where each belongs.
        """
        tensor = self._file.tensors[self._stored_names[name]]
        return self._file.blocks(tensor), tensor.type_name, tensor.shape

    def row_order(self, name: str) -> npt.NDArray[np.int64] | None:
        """Stored row of each Hugging Face row, or None where the orders are equal.

        Rows of a head are stored as (half 0, half 1) pairs: row ``2 * i + half`` of the file is
        row ``half * head_dim / 2 + i`` of the checkpoint.
        """
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = self._file.tensors[self._stored_names[name]].shape[0]
            pairs = np.arange(rows).reshape(-1, self.config.head_dim // 2, 2)
            return pairs.swapaxes(1, 2).reshape(rows).copy()
        return None

    def _tokenizer_bytes(self) -> Iterable[bytes]:
        for name in sorted(self._file.keys):
            if name.startswith("tokenizer."):
                yield name.encode()
                yield self._file.key_bytes(name)

    def _stored(self) -> Iterator[tuple[str, str, tuple[int, ...], npt.NDArray[np.uint8]]]:
        for tensor in self._file.tensors.values():
            yield tensor.name, tensor.type_name, tensor.shape, self._file.blocks(tensor)


def _canonical(name: str) -> str:
    """The Hugging Face name; a name that has none is returned as it is and refused later."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _WHOLE_NAMES.get(name, name)
    part = _LAYER_NAMES.get(layer[2])
    return name if part is None else f"model.layers.{int(layer[1])}.{part}"


def _model_id(file: GgufFile) -> str:
    """``general.name`` if it can be an id, else the file's name without type and extension."""
    name = file.keys.get("general.name")
    if name is not None and isinstance(name.value, str) and _SANE_NAME.fullmatch(name.value):
        return name.value
    return _QUANTISATION_SUFFIX.sub("", file.path.stem)


def _config(file: GgufFile) -> ModelConfig:
    family = file.text("general.architecture")
    if family != "llama":
        raise UnsupportedModel(
            f"{file.path.name}: models of the family {family!r:.80} are not supported, only llama"
        )
    _refuse_variants(file)
    hidden = file.integer("llama.embedding_length")
    num_heads = file.integer("llama.attention.head_count")
    if num_heads < 1:
        raise CorruptModel(f"{file.path.name}: num_heads is {num_heads}")
    head_dim = file.integer("llama.attention.key_length", hidden // num_heads)
    for name in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if file.integer(name, head_dim) != head_dim:
            raise UnsupportedModel(
                f"{file.path.name}: {name} differs from the head size {head_dim}; not supported"
            )
    config = ModelConfig(
        family=family,
        vocab_size=len(file.texts("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=file.integer("llama.feed_forward_length"),
        num_layers=file.integer("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=file.integer("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_positions=file.integer("llama.context_length"),
        rope_theta=file.number("llama.rope.freq_base", 10000.0),
        rms_norm_eps=file.number("llama.attention.layer_norm_rms_epsilon"),
        tied_head="output.weight" not in file.tensors,
        bos_token_id=_optional_integer(file, "tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(file),
    )
    check_config(config, file.path.name)
    return config


def _refuse_variants(file: GgufFile) -> None:
    """Refuse what the architecture name does not tell and would compute wrong silently."""
    where = file.path.name
    if file.integer("split.count", 1) > 1:
        raise UnsupportedModel(f"{where}: a GGUF split over several files; merge it into one")
    if file.integer("llama.expert_count", 0):
        raise UnsupportedModel(f"{where}: mixture of experts is not supported")
    if file.integer("llama.attention.sliding_window", 0):
        raise UnsupportedModel(f"{where}: sliding-window attention is not supported")
    scaling = file.text("llama.rope.scaling.type", "none")
    factor = file.number("llama.rope.scale_linear", 1.0)
    if scaling != "none" or factor not in (0.0, 1.0) or "rope_freqs.weight" in file.tensors:
        raise UnsupportedModel(f"{where}: rope scaling is not supported")


def _optional_integer(file: GgufFile, name: str) -> int | None:
    return file.integer(name) if name in file.keys else None


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """End of text, of turn and of message: whichever the file names, each once."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (_optional_integer(file, f"tokenizer.ggml.{name}") for name in names)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))
