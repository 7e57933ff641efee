"""A model in a Hugging Face directory: config.json beside *.safetensors. No torch at import.

Called by ``open``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.errors import CorruptModel, ModelNotFound, UnsupportedModel
from engine.loaders.files import ModelFiles, check_tensors
from engine.loaders.hf_config import config_from_json
from engine.loaders.hf_fields import read_object
from engine.loaders.hf_tokenizer import TOKENIZER_FILES, tokenizer_from_directory
from engine.loaders.safetensors_file import SafeTensor, SafetensorsFile
from engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FILE_NAME = re.compile(r"[^/\\\0]+\.safetensors")
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""Old checkpoints carry this constant, which follows from rope_theta."""


class HfDirectory(ModelFiles):
    """One directory.

    Args:
        model_id: None: the directory's name.

    Raises:
        ModelNotFound, CorruptModel, UnsupportedModel: see ``open_model``.
    """

    def __init__(
        self, path: Path, model_id: str | None = None, aliases: tuple[str, ...] = ()
    ) -> None:
        self._path = path
        if not (path / "config.json").is_file():
            raise ModelNotFound(
                f"{path} has no config.json; give a Hugging Face directory or a .gguf file"
            )
        config = config_from_json(path)
        super().__init__(model_id or path.resolve().name, aliases, config)
        self._tensors: dict[str, tuple[SafetensorsFile, SafeTensor]] = {}
        for file_name in _weight_files(path):
            file = SafetensorsFile(path / file_name)
            for name, tensor in file.tensors.items():
                if name in self._tensors:
                    raise CorruptModel(f"{path.name}: tensor {name:.80} is in two files")
                if not name.endswith(_IGNORED_SUFFIX):
                    self._tensors[name] = (file, tensor)
        shapes = {name: tensor.shape for name, (_, tensor) in self._tensors.items()}
        self._names = check_tensors(config, shapes, path.name)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_directory(self._path, self.config)

    def tensor_names(self) -> tuple[str, ...]:
        return self._names

    def tensor(self, name: str, dtype: str) -> torch.Tensor:
        from engine.loaders.dequantize import to_tensor

        file, tensor = self._tensors[name]
        return to_tensor(file.stored(tensor), tensor.type_name, tensor.shape, dtype)

    def _tokenizer_bytes(self) -> Iterable[bytes]:
        for name in TOKENIZER_FILES:
            file = self._path / name
            yield name.encode()
            yield file.read_bytes() if file.is_file() else b""

    def _stored(self) -> Iterator[tuple[str, str, tuple[int, ...], npt.NDArray[np.uint8]]]:
        for name, (file, tensor) in self._tensors.items():
            yield name, tensor.type_name, tensor.shape, file.stored(tensor)


def _weight_files(path: Path) -> list[str]:
    """Names of the files that hold the weights."""
    if (path / _INDEX).is_file():
        weight_map = read_object(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CorruptModel(f"{_INDEX}: weight_map is missing")
        # The index is data from elsewhere: it may name files of its own directory only.
        for name in weight_map.values():
            if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
                raise CorruptModel(f"{_INDEX}: {name!r:.80} is no name of a safetensors file")
        names = set(weight_map.values())
        return sorted(names)
    if (path / _SINGLE).is_file():
        return [_SINGLE]
    found = sorted(file.name for file in path.glob("*.safetensors"))
    if not found:
        if any(path.glob("*.bin")):
            raise UnsupportedModel(
                f"{path} has pickled weights (*.bin) only; convert them to safetensors"
            )
        raise ModelNotFound(f"{path} has no *.safetensors")
    return found
