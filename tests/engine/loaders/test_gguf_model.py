"""GGUF weights and configuration, against the ``gguf`` library and ``transformers``."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.errors import CorruptModel, ModelError, UnsupportedModel
from engine.loaders.dequantize import to_tensor
from engine.loaders.gguf_model import GgufModel
from engine.loaders.open import open_model
from tests.engine.loaders.llama_files import (
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    TOKENS,
    interleave,
    random_weights,
    write_gguf,
)

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"


def test_configuration(tmp_path: Path) -> None:
    model = open_model(str(write_gguf(tmp_path / "tiny.Q8_0.gguf", random_weights())))
    config = model.config
    assert (config.hidden_size, config.intermediate_size) == (HIDDEN, FFN)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.num_layers, config.vocab_size) == (LAYERS, len(TOKENS))
    assert (config.max_positions, config.rope_theta) == (128, 5000.0)
    # The decimal that was written, not its float32 neighbour 9.99999974e-06.
    assert config.rms_norm_eps == 1e-5
    assert (config.bos_token_id, config.eos_token_ids) == (256, (257,))
    assert config.tied_head
    assert (model.model_id, model.aliases) == ("tiny", ())


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    keys = {
        "llama.rope.freq_base": None,
        "llama.attention.head_count_kv": HEADS,
        "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.add_bos_token": None,
        "tokenizer.ggml.eot_token_id": 5,
        "llama.rope.scaling.type": "none",
    }
    weights = random_weights()
    for layer in range(LAYERS):
        for part in ("k", "v"):
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            weights[name] = np.zeros((HEADS * HEAD_DIM, HIDDEN), np.float32)
    config = open_model(str(write_gguf(tmp_path / "a.gguf", weights, keys=keys))).config
    assert config.rope_theta == 10000.0
    assert config.bos_token_id is None
    assert config.eos_token_ids == (257, 5)


@pytest.mark.parametrize("name", ["Tiny-7B_v1.5", None])
def test_general_name_is_the_id_if_it_can_be(tmp_path: Path, name: str | None) -> None:
    path = write_gguf(
        tmp_path / "some-Model.f16.gguf",
        random_weights(),
        keys={"general.name": name or "has spaces / and slashes"},
    )
    assert open_model(str(path)).model_id == (name or "some-Model")


@pytest.mark.parametrize(
    "type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
)
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_has_the_stored_values(tmp_path: Path, type_name: str, tied: bool) -> None:
    weights = random_weights(tied=tied)
    model = open_model(str(write_gguf(tmp_path / "a.gguf", weights, default_type=type_name)))
    assert set(model.tensor_names()) == set(weights)
    kind = gguf.GGMLQuantizationType[type_name]
    for name, weight in weights.items():
        expected = torch.from_numpy(
            gguf.dequantize(gguf.quantize(weight, kind), kind) if weight.ndim > 1 else weight
        )
        for dtype in ("float32", "bfloat16", "float16"):
            tensor = model.tensor(name, dtype)
            assert tensor.dtype is getattr(torch, dtype)
            assert torch.equal(tensor, expected.to(tensor.dtype)), name


@pytest.mark.parametrize(
    ("type_name", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")]
)
def test_stored_type_is_a_view_of_the_file(tmp_path: Path, type_name: str, dtype: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", random_weights(), default_type=type_name)
    model = open_model(str(path))
    assert isinstance(model, GgufModel)
    stored, stored_type, shape = model.raw(UP_PROJ)
    tensor = model.tensor(UP_PROJ, dtype)
    assert (stored_type, shape) == (type_name, (FFN, HIDDEN))
    assert tensor.data_ptr() == stored.ctypes.data
    # What is written to a view stays in this process.
    tensor.zero_()
    fresh = open_model(str(path)).tensor(UP_PROJ, dtype)
    assert fresh.count_nonzero() > 0


def test_raw_blocks_are_the_files_own(tmp_path: Path) -> None:
    weights = random_weights()
    model = GgufModel(write_gguf(tmp_path / "a.gguf", weights, default_type="Q4_1"))
    kind = gguf.GGMLQuantizationType.Q4_1
    stored, type_name, shape = model.raw(Q_PROJ)
    assert (type_name, shape, stored.dtype) == ("Q4_1", (HEADS * HEAD_DIM, HIDDEN), np.uint8)
    expected = gguf.quantize(interleave(weights[Q_PROJ], HEADS), kind)
    assert np.array_equal(stored, expected.reshape(-1))
    order = model.row_order(Q_PROJ)
    assert order is not None
    rows = gguf.dequantize(expected, kind)[order]
    assert np.array_equal(rows, model.tensor(Q_PROJ, "float32").numpy())
    assert model.row_order(UP_PROJ) is None


def test_large_tensors_are_converted_in_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "a.gguf", random_weights(), default_type="Q4_1")
    whole = open_model(str(path)).tensor(UP_PROJ, "float32")
    monkeypatch.setattr("engine.loaders.dequantize._VALUES_PER_PASS", 64)
    assert torch.equal(open_model(str(path)).tensor(UP_PROJ, "float32"), whole)


@pytest.mark.parametrize(
    ("keys", "error", "reason"),
    [
        ({"general.architecture": "phi3"}, UnsupportedModel, "family 'phi3'"),
        (
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0},
            UnsupportedModel,
            "rope scaling 'longrope'",
        ),
        ({"llama.rope.scale_linear": -4.0}, CorruptModel, "rope scaling factor is -4"),
        ({"llama.expert_count": 8}, UnsupportedModel, "experts"),
        ({"llama.attention.sliding_window": "a"}, CorruptModel, "sliding_window is not an integer"),
        ({"llama.rope.dimension_count": 8}, UnsupportedModel, "dimension_count"),
        ({"llama.attention.value_length": 8}, UnsupportedModel, "value_length"),
        ({"split.count": 2}, UnsupportedModel, "split"),
        ({"llama.block_count": None}, CorruptModel, "llama.block_count is missing"),
        ({"llama.block_count": "two"}, CorruptModel, "llama.block_count is not an integer"),
        ({"llama.block_count": 2**31 - 1}, CorruptModel, "layers.2.* is missing"),
        ({"llama.block_count": 0}, CorruptModel, "num_layers is 0"),
        ({"llama.embedding_length": 32}, CorruptModel, "has shape"),
        ({"llama.attention.head_count": 0}, CorruptModel, "num_heads is 0"),
        ({"llama.attention.head_count_kv": 3}, CorruptModel, "cannot share"),
        ({"llama.rope.freq_base": float("nan")}, CorruptModel, "freq_base"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, CorruptModel, "rms_norm_eps"),
        ({"tokenizer.ggml.eos_token_id": 5000}, CorruptModel, "outside the vocabulary"),
        ({"tokenizer.ggml.tokens": ["a"]}, CorruptModel, "outside the vocabulary"),
        ({"tokenizer.ggml.tokens": [1, 2]}, CorruptModel, "not an array of strings"),
        ({"general.alignment": 7}, CorruptModel, "general.alignment"),
        ({"llama.block_count": 1}, UnsupportedModel, "layers.1"),
    ],
)
def test_what_keys_are_refused(
    tmp_path: Path, keys: dict[str, object], error: type[ModelError], reason: str
) -> None:
    path = write_gguf(tmp_path / "a.gguf", random_weights(), keys=keys)
    with pytest.raises(error, match=reason) as caught:
        open_model(str(path))
    assert "a.gguf" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("type_name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_types_that_no_library_writes(tmp_path: Path, type_name: str) -> None:
    """Random bytes stand for blocks; scales that are no numbers are made some."""
    kind = gguf.GGMLQuantizationType[type_name]
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(1)
    stored = draw.integers(0, 256, (FFN, 256 // values * num_bytes), np.uint8)
    # An fp16 whose exponent is not all ones, wherever the type keeps its scales.
    stored &= 0xBF
    expected = torch.from_numpy(gguf.dequantize(stored, kind))
    assert expected.isfinite().all() and expected.std() > 0
    got = to_tensor(stored.reshape(-1), type_name, (FFN, 256), "float32")
    assert torch.equal(got, expected)


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", random_weights(), {UP_PROJ: "MXFP4"})
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_up\.weight is of type MXFP4"):
        open_model(str(path))


def test_missing_and_foreign_tensors(tmp_path: Path) -> None:
    weights = random_weights()
    del weights[Q_PROJ]
    with pytest.raises(CorruptModel, match=r"tensor model\.layers\.1\.self_attn\.q_proj\.weight"):
        open_model(str(write_gguf(tmp_path / "a.gguf", weights)))
    path = tmp_path / "b.gguf"
    write_gguf(path, random_weights())
    # The same length, so that the file stays whole: a bias that nothing here would add.
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_norm.weight", b"blk.1.ffn_norm.biases"))
    with pytest.raises(CorruptModel, match=r"post_attention_layernorm\.weight is missing"):
        open_model(str(path))


def test_identity(tmp_path: Path) -> None:
    weights = random_weights()
    path = write_gguf(tmp_path / "a.gguf", weights)
    identity = open_model(str(path)).identity
    assert len(identity) == 64
    copy = write_gguf(tmp_path / "b.gguf", weights, keys={"general.name": "other"})
    assert open_model(str(copy)).identity == identity
    changed = {
        "weights": write_gguf(tmp_path / "c.gguf", random_weights(seed=1)),
        "types": write_gguf(tmp_path / "d.gguf", weights, default_type="F16"),
        "config": write_gguf(tmp_path / "e.gguf", weights, keys={"llama.rope.freq_base": 1.0}),
        "tokenizer": write_gguf(
            tmp_path / "f.gguf", weights, keys={"tokenizer.ggml.pre": "smollm"}
        ),
    }
    content = path.read_bytes()
    changed["last byte"] = tmp_path / "g.gguf"
    changed["last byte"].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for what, other in changed.items():
        assert open_model(str(other)).identity != identity, what


def test_demo_equals_the_gguf_library() -> None:
    model = open_model("demo")
    assert isinstance(model, GgufModel)
    assert (model.model_id, model.aliases) == ("SmolLM2-135M-Instruct", ("demo",))
    assert (model.config.num_layers, model.config.head_dim) == (30, 64)
    assert (model.config.rope_theta, model.config.max_positions) == (100000.0, 8192)
    assert (model.config.bos_token_id, model.config.eos_token_ids) == (1, (2,))
    for name in model.tensor_names():
        if name.startswith("model.layers.") and ".0." not in name:
            continue
        stored, type_name, shape = model.raw(name)
        kind = gguf.GGMLQuantizationType[type_name]
        rows = stored if len(shape) == 1 else stored.reshape(shape[0], -1)
        expected = gguf.dequantize(rows.view(np.float32) if type_name == "F32" else rows, kind)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # From the definition of the order: rows (half 0, half 1) of each pair in turn.
            pairs = expected.reshape(-1, 32, 2, shape[1])
            expected = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(shape)
        assert np.array_equal(model.tensor(name, "float32").numpy(), expected), name


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_demo_equals_transformers() -> None:
    """By its GGUF reader alone: ``from_pretrained`` wants a package more for the same tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = open_model("demo")
    assert isinstance(model, GgufModel)
    config = model.config
    with torch.device("meta"):
        target = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                tie_word_embeddings=True,
            )
        )
    reference = load_gguf_checkpoint(str(model.path), return_tensors=True, model_to_load=target)
    assert set(model.tensor_names()) == set(reference["tensors"])
    for name in model.tensor_names():
        assert torch.equal(model.tensor(name, "float32"), reference["tensors"][name]), name
