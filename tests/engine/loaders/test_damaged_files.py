"""Damaged files end in one clear line: never another exception, a hang, or a lot of memory."""

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CorruptModel, ModelError
from engine.loaders.gguf_file import GgufFile, GgufTensor
from engine.loaders.open import open_model
from tests.engine.loaders.llama_files import random_weights, write_gguf
from tests.tiny_model import make_tiny_model


def use_everything(model: str) -> None:
    """All that a router and a worker do at start."""
    files = open_model(model)
    assert len(files.identity) == 64
    tokenizer = files.tokenizer()
    tokenizer.decode(tokenizer.encode("abc 123 é"))
    for name in files.tensor_names():
        files.tensor(name, "float32")


def outcome(model: str) -> str | None:
    """The error's line, or None if the damage does not show."""
    try:
        use_everything(model)
    except ModelError as error:
        line = str(error)
        assert line and "\n" not in line and len(line) < 500
        return line
    return None


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "a.gguf"
    return write_gguf(path, random_weights(), default_type="Q8_0").read_bytes()


@pytest.fixture(scope="module")
def hf_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("hf") / "tiny", num_layers=1)


@pytest.fixture(scope="module")
def try_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], str | None]:
    path = tmp_path_factory.mktemp("damaged") / "a.gguf"

    def attempt(content: bytes) -> str | None:
        # A new file each time: an earlier one may still be mapped, and would shrink under it.
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        return outcome(str(path))

    return attempt


def test_whole_files_are_fine(
    gguf_bytes: bytes, hf_directory: Path, try_gguf: Callable[[bytes], str | None]
) -> None:
    assert try_gguf(gguf_bytes) is None
    assert outcome(str(hf_directory)) is None


@settings(max_examples=150)
@given(at=st.floats(0, 1, exclude_max=True), in_header=st.booleans())
def test_truncated_gguf(
    gguf_bytes: bytes,
    try_gguf: Callable[[bytes], str | None],
    at: float,
    in_header: bool,
) -> None:
    length = int(at * (15000 if in_header else len(gguf_bytes)))
    line = try_gguf(gguf_bytes[:length])
    assert line is not None and line.startswith("a.gguf")


@settings(max_examples=300)
@given(
    flips=st.lists(st.tuples(st.integers(0, 12000), st.integers(0, 255)), min_size=1, max_size=3)
)
def test_gguf_with_other_bytes_in_its_header(
    gguf_bytes: bytes, try_gguf: Callable[[bytes], str | None], flips: list[tuple[int, int]]
) -> None:
    content = bytearray(gguf_bytes)
    for at, byte in flips:
        content[at] = byte
    try_gguf(bytes(content))


@given(st.binary(max_size=200))
def test_garbage_after_the_magic(try_gguf: Callable[[bytes], str | None], content: bytes) -> None:
    assert try_gguf(b"GGUF\3\0\0\0" + content) is not None


def hostile_headers() -> dict[str, bytes]:
    start = b"GGUF" + struct.pack("<I", 3)
    huge = 1 << 40
    key = struct.pack("<Q", 1) + b"k"
    dims = struct.pack("<QQQQ", huge, huge, huge, huge)
    return {
        "tensors": start + struct.pack("<QQ", huge, 0),
        "keys": start + struct.pack("<QQ", 0, huge),
        "key name": start + struct.pack("<QQ", 0, 1) + struct.pack("<Q", huge) + bytes(64),
        "string": start + struct.pack("<QQ", 0, 1) + key + struct.pack("<IQ", 8, huge),
        "array": start + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 0, huge),
        "strings": start + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, huge),
        "nested": start + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 9, 4) + bytes(64),
        "dimensions": start + struct.pack("<QQ", 1, 0) + key + struct.pack("<I", huge % 2**32 + 9),
        "shape": start + struct.pack("<QQ", 1, 0) + key + struct.pack("<I", 4) + dims + bytes(64),
    }


@pytest.mark.parametrize("name", hostile_headers())
def test_claimed_sizes_cost_nothing(name: str, try_gguf: Callable[[bytes], str | None]) -> None:
    try_gguf(b"")  # imports and caches are not the file's cost
    tracemalloc.start()
    try:
        line = try_gguf(hostile_headers()[name])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert line is not None
    assert peak_bytes < 1 << 20


@settings(max_examples=60)
@given(at=st.floats(0, 1, exclude_max=True))
def test_truncated_safetensors(hf_directory: Path, at: float) -> None:
    weights = hf_directory / "model.safetensors"
    whole = weights.read_bytes()
    try:
        weights.unlink()
        weights.write_bytes(whole[: int(at * len(whole))])
        line = outcome(str(hf_directory))
        assert line is not None and line.startswith("model.safetensors")
    finally:
        weights.unlink()
        weights.write_bytes(whole)


@settings(max_examples=200)
@given(
    name=st.sampled_from(["model.safetensors", "config.json", "tokenizer.json"]),
    flips=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3
    ),
)
def test_other_bytes_in_a_directory(
    hf_directory: Path, name: str, flips: list[tuple[float, int]]
) -> None:
    path = hf_directory / name
    whole = path.read_bytes()
    content = bytearray(whole)
    for at, byte in flips:
        content[int(at * min(len(whole), 3000))] = byte
    try:
        path.unlink()
        path.write_bytes(content)
        outcome(str(hf_directory))
    finally:
        path.unlink()
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": 1}', "malformed"),
        (b'{"a": {"dtype": "F32", "shape": [1, -1], "data_offsets": [0, 4]}}', "malformed"),
        (b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', "malformed"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "4 bytes for shape"),
        (b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}', "0 bytes for shape"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [96, 100]}}', "truncated"),
        (b'{"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}', "of type I64"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_safetensors_headers(tmp_path: Path, header: bytes, reason: str) -> None:
    directory = make_tiny_model(tmp_path / "tiny", num_layers=1)
    weights = directory / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    line = outcome(str(directory))
    assert line is not None and reason in line


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff", b'{"model": {"type": "BPE"}}', b'{"decoder": null}', b"{} x"],
)
def test_tokenizer_json_that_is_none(tmp_path: Path, content: bytes) -> None:
    directory = make_tiny_model(tmp_path / "tiny", num_layers=1)
    (directory / "tokenizer.json").write_bytes(content)
    line = outcome(str(directory))
    assert line is not None and "tokenizer.json" in line


def test_deep_json(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "tiny", num_layers=1)
    (directory / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(CorruptModel, match=r"config\.json is not JSON"):
        open_model(str(directory))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 1}))
    with pytest.raises(CorruptModel, match="hidden_size is missing"):
        open_model(str(directory))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            b"llama.rope.freq_base",
            b"llama.context_length",
            "llama.context_length appears twice",
        ),
        (
            b"blk.0.ffn_gate.weight",
            b"blk.1.ffn_gate.weight",
            "blk.1.ffn_gate.weight appears twice",
        ),
        (b"<|bos|>", b"<|\xffos|>", "is not UTF-8"),
        (b"tokenizer.ggml.pre\x08", b"tokenizer.ggml.pre\x0d", "unknown value type 13"),
        (b"token_type\x09\0\0\0\x05", b"token_type\x09\0\0\0\x0d", "unknown array type 13"),
    ],
)
def test_gguf_that_contradicts_itself(
    gguf_bytes: bytes,
    try_gguf: Callable[[bytes], str | None],
    old: bytes,
    new: bytes,
    reason: str,
) -> None:
    assert gguf_bytes.count(old) == 1 and len(old) == len(new)
    line = try_gguf(gguf_bytes.replace(old, new))
    assert line is not None and reason in line


def test_gguf_tensor_off_its_place(
    gguf_bytes: bytes, try_gguf: Callable[[bytes], str | None]
) -> None:
    """One-dimensional: name, 1, length, type, offset."""
    entry = b"output_norm.weight" + struct.pack("<IQI", 1, 64, 0)
    at = gguf_bytes.index(entry) + len(entry)

    def moved(offset: int) -> bytes:
        return gguf_bytes[:at] + struct.pack("<Q", offset) + gguf_bytes[at + 8 :]

    assert "not aligned" in (try_gguf(moved(33)) or "")
    assert "lacks its last" in (try_gguf(moved(1 << 40)) or "")


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tmp_path / "a.gguf", random_weights()))
    with pytest.raises(CorruptModel, match="rows of tensor x are 65 long, not a multiple of 32"):
        file.blocks(GgufTensor("x", (2, 65), "Q8_0", 0))
