"""JSON objects of a Hugging Face directory, read with types. No torch.

Knows nothing of models. Called by ``hf_config``, ``hf_rope``, ``hf_directory`` and
``hf_tokenizer``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import CorruptModel, ModelNotFound

_MAX_JSON_BYTES = 256 << 20


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelNotFound: the file cannot be read.
        CorruptModel: it is not a JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CorruptModel(f"{path.name} is larger than any such file")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path.name} is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(value, dict):
        raise CorruptModel(f"{path.name} is not a JSON object")
    return value


class Fields:
    """Typed access to a JSON object. A null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(name, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(name, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self._wrong_type(name, "a number of ordinary size") from None

    def optional_number(self, name: str) -> float | None:
        """None where it is absent."""
        return None if self.values.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong_type(name, "a boolean")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings, or nothing."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong_type(name, "a list of strings")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of them, or nothing."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self._wrong_type(name, "a token id or a list of them")
        return tuple(ids)

    def section(self, name: str) -> "Fields":
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self._wrong_type(name, "an object")
        return Fields(value, f"{self.where}: {name}")

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise CorruptModel(f"{self.where}: {name} is missing")
        return value

    def _wrong_type(self, name: str, wanted: str) -> CorruptModel:
        return CorruptModel(f"{self.where}: {name} is not {wanted}")
