"""Models by hub id, through the ``huggingface_hub`` library and its cache. No torch.

``org/name`` is a repository with config.json and safetensors, ``org/name/file.gguf`` one file of a
repository. Offline, what the cache holds is served. Knows nothing of formats. Called by ``open``,
and by the command line before it starts a cluster, so that only one process downloads.
"""

import re
from pathlib import Path

from engine.errors import ModelNotFound

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ID = re.compile(rf"({_PART}/{_PART})(?:/([^\\\0]{{1,200}}\.gguf))?", re.IGNORECASE)
# All that is read of a directory: no pickles, no copies of the weights in other formats.
_WANTED = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "*.safetensors",
]
# Weights in subfolders are other forms of the same model.
_UNWANTED = ["*/*"]


def is_hub_id(model: str) -> bool:
    """Whether this can be one; what is on disk under this name comes first."""
    match = _ID.fullmatch(model)
    if match is None or ".." in model or Path(model).exists():
        return False
    # Two parts that end so are a path with a mistake in it, not a repository.
    return match[2] is not None or not model.lower().endswith(".gguf")


def fetch(model: str) -> Path:
    """The directory or GGUF file in the cache, downloaded if it is not there.

    Args:
        model: for which ``is_hub_id`` holds.

    Raises:
        ModelNotFound: the hub has none, refuses it, or is out of reach and the cache lacks it.
    """
    import huggingface_hub
    from huggingface_hub import errors

    match = _ID.fullmatch(model)
    if match is None:
        raise ModelNotFound(f"{model:.200} is no hub id; give org/name")
    repository, file = match.groups()
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repository, file))
        return Path(
            huggingface_hub.snapshot_download(
                repository, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
            )
        )
    except errors.GatedRepoError:
        reason = "is gated: accept its terms on the hub and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "is not on the hub; check the name, or set HF_TOKEN if it is private"
    except (errors.RemoteEntryNotFoundError, errors.HFValidationError) as error:
        reason = f"cannot be fetched: {_first_line(error)}"
    # The library and the one it speaks HTTP with raise many kinds, most of them also OSErrors.
    except Exception as error:
        reason = (
            f"is not on disk, nor in the hub's cache, and the hub is out of reach "
            f"({type(error).__name__}); connect, or fetch it elsewhere with "
            f"hf download {repository} and give the directory"
        )
    raise ModelNotFound(f"{model:.200} {reason}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
