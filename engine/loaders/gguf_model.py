"""A model in a GGUF file: its tensors and their order. No torch at import.

Llama's GGUF keeps the rows of q and k with the two rotary halves interleaved; ``tensor`` undoes it,
``raw`` hands out the file's own blocks for kernels that compute on them. Called by ``open``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.loaders.files import ModelFiles, check_tensors
from engine.loaders.gguf_config import ROPE_DIVISORS, config_from_gguf
from engine.loaders.gguf_file import GgufFile
from engine.loaders.gguf_names import canonical
from engine.loaders.gguf_tokenizer import tokenizer_from_gguf
from engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

_SANE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_QUANTISATION_SUFFIX = re.compile(r"[.-](?:i?q\d\w*|b?f16|f32)$", re.IGNORECASE)

_ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")


class GgufModel(ModelFiles):
    """One GGUF file.

    Raises:
        ModelNotFound, CorruptModel, UnsupportedModel: see ``open_model``.
    """

    def __init__(self, path: Path, aliases: tuple[str, ...] = ()) -> None:
        self.path = path
        self._file = GgufFile(path)
        family, config = config_from_gguf(self._file)
        self._interleaves = family.interleaves
        super().__init__(_model_id(self._file), aliases, config)
        self._stored_names = {
            canonical(name, config.post_norms): name
            for name in self._file.tensors
            if name != ROPE_DIVISORS
        }
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
        if self._interleaves and name.endswith(_ROTATED):
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


def _model_id(file: GgufFile) -> str:
    """``general.name`` if it can be an id, else the file's name without type and extension."""
    name = file.keys.get("general.name")
    if name is not None and isinstance(name.value, str) and _SANE_NAME.fullmatch(name.value):
        return name.value
    return _QUANTISATION_SUFFIX.sub("", file.path.stem)
