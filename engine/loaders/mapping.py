"""Map a file into memory. Called by the containers, ``gguf_file`` and ``safetensors_file``."""

import mmap
from pathlib import Path

from engine.errors import CorruptModel, ModelNotFound


def map_file(path: Path) -> mmap.mmap:
    """Map ``path`` copy-on-write: torch refuses to wrap read-only memory without a warning, and
    nothing written there can reach the file."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise CorruptModel(f"{path.name} is empty; fetch the file again") from None
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror}") from None
