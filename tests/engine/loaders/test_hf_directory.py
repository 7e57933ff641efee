"""Hugging Face directories: saved by ``transformers``, refused by feature, broken by hand."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from engine.loaders.open import open_model
from tests.tiny_model import CONTEXT, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, make_tiny_model

UP_PROJ = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "Tiny-1", num_layers=2)


def edit_config(directory: Path, **changes: Any) -> str:
    """Change keys of config.json, or drop them with None."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return str(directory)


def edit_weights(directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> str:
    path = directory / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(weights)
    path.unlink()
    save_file(weights, path)
    return str(directory)


def test_configuration(tiny: Path) -> None:
    model = open_model(str(tiny))
    assert (model.model_id, model.aliases) == ("Tiny-1", ())
    config = model.config
    assert (config.hidden_size, config.num_layers, config.max_positions) == (HIDDEN, 2, CONTEXT)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.rope_theta, config.rms_norm_eps, config.tied_head) == (10000.0, 1e-5, False)
    assert (config.bos_token_id, config.eos_token_ids) == (256, (257,))


def test_defaults_and_places(tiny: Path) -> None:
    edit_config(tiny, num_key_value_heads=None, head_dim=None, rope_theta=None, eos_token_id=[3, 4])
    edit_config(tiny, rope_parameters={"rope_theta": 500000.0, "rope_type": "default"})
    (tiny / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')

    def full_heads(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                weights[name] = torch.zeros(HEADS * HEAD_DIM, HIDDEN)

    config = open_model(edit_weights(tiny, full_heads)).config
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (HEADS, HEAD_DIM, 500000.0)
    assert config.eos_token_ids == (3, 4, 5)


def test_stored_type_is_a_view_of_the_file(tiny: Path) -> None:
    model = open_model(str(tiny))
    assert (
        model.tensor(UP_PROJ, "float32").data_ptr() == model.tensor(UP_PROJ, "float32").data_ptr()
    )
    converted = model.tensor(UP_PROJ, "bfloat16")
    assert torch.equal(converted, load_file(tiny / "model.safetensors")[UP_PROJ].bfloat16())


def test_tensors_that_are_not_aligned(tiny: Path) -> None:
    """The format pads its header, but does not have to."""
    path = tiny / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].rstrip()
    header += b" " * (3 - (8 + len(header)) % 4)
    path.unlink()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    model = open_model(str(tiny))
    for name, tensor in load_file(path).items():
        assert torch.equal(model.tensor(name, "float32"), tensor)


def test_head_that_is_tied(tiny: Path) -> None:
    """Some checkpoints carry the tied head a second time, some constants of old times."""

    def add(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    model = open_model(edit_weights(Path(edit_config(tiny, tie_word_embeddings=True)), add))
    assert model.config.tied_head
    assert "lm_head.weight" not in model.tensor_names()


def test_identity(tiny: Path, tmp_path: Path) -> None:
    identity = open_model(str(tiny)).identity
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    assert open_model(str(copy)).identity == identity
    (copy / "README.md").write_text("other")
    assert open_model(str(copy)).identity == identity
    edit_config(copy, rope_theta=20000.0)
    changed = [identity, open_model(str(copy)).identity]
    edit_config(copy, rope_theta=10000.0)
    options = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(options | {"chat_template": "x"}))
    changed.append(open_model(str(copy)).identity)
    shutil.copy(tiny / "tokenizer_config.json", copy)
    changed.append(open_model(edit_weights(copy, lambda w: w[UP_PROJ][0].zero_())).identity)
    assert len(set(changed)) == 4


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"model_type": "phi3"}, UnsupportedModel, "family 'phi3'"),
        ({"model_type": None}, UnsupportedModel, "family None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, UnsupportedModel, "architectures"),
        ({"attention_bias": True}, CorruptModel, r"q_proj\.bias is missing"),
        ({"mlp_bias": True}, CorruptModel, r"gate_proj\.bias is missing"),
        ({"sliding_window": 4096}, UnsupportedModel, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModel, "quantization_config"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, UnsupportedModel, "'longrope'"),
        ({"rope_parameters": {"rope_type": 3}}, CorruptModel, "rope_type is not a string"),
        ({"rope_parameters": {"rope_type": "llama3"}}, CorruptModel, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, CorruptModel, "factor is 0"),
        (
            {
                "rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4}
                | {"high_freq_factor": 4}
            },
            CorruptModel,
            "fast - slow is 0",
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}},
            CorruptModel,
            "original_max_position_embeddings is 0",
        ),
        ({"partial_rotary_factor": 0.5}, UnsupportedModel, "partial rotary"),
        ({"rope_scaling": "linear"}, CorruptModel, "rope_scaling is not an object"),
        ({"vocab_size": None}, CorruptModel, "vocab_size is missing"),
        ({"vocab_size": "many"}, CorruptModel, "vocab_size is not an integer"),
        ({"vocab_size": True}, CorruptModel, "vocab_size is not an integer"),
        ({"vocab_size": 261}, CorruptModel, "has shape"),
        ({"num_hidden_layers": 3}, CorruptModel, r"layers\.2\.input_layernorm\.weight is missing"),
        ({"num_hidden_layers": 1}, UnsupportedModel, r"layers\.1\."),
        ({"num_hidden_layers": 10**12}, CorruptModel, "num_layers is 1000000000000"),
        ({"num_attention_heads": 0}, CorruptModel, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, CorruptModel, "cannot share"),
        ({"head_dim": 15}, CorruptModel, "odd"),
        ({"rms_norm_eps": float("nan")}, CorruptModel, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, CorruptModel, "rms_norm_eps"),
        ({"rope_theta": "big"}, CorruptModel, "rope_theta is not a number"),
        ({"eos_token_id": [1, "2"]}, CorruptModel, "eos_token_id"),
        ({"bos_token_id": 999}, CorruptModel, "outside the vocabulary"),
        ({"tie_word_embeddings": "yes"}, CorruptModel, "tie_word_embeddings is not a boolean"),
    ],
)
def test_what_configurations_are_refused(
    tiny: Path, changes: dict[str, Any], error: type[ModelError], reason: str
) -> None:
    with pytest.raises(error, match=reason) as caught:
        open_model(edit_config(tiny, **changes))
    assert "Tiny-1" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "error", "reason"),
    [
        (lambda w: w.pop(UP_PROJ), CorruptModel, "up_proj.weight is missing"),
        (lambda w: w.update({UP_PROJ: torch.ones(3, 3)}), CorruptModel, r"shape \[3, 3\]"),
        (lambda w: w.update({UP_PROJ: w[UP_PROJ].T.contiguous()}), CorruptModel, "shape"),
        (lambda w: w.pop("lm_head.weight"), CorruptModel, "lm_head.weight is missing"),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            UnsupportedModel,
            "q_proj.bias is not part of",
        ),
        (lambda w: w.update({UP_PROJ: w[UP_PROJ].double()}), UnsupportedModel, "of type F64"),
    ],
)
def test_what_weights_are_refused(
    tiny: Path,
    edit: Callable[[dict[str, torch.Tensor]], Any],
    error: type[ModelError],
    reason: str,
) -> None:
    with pytest.raises(error, match=reason):
        open_model(edit_weights(tiny, edit))


def test_directories_without_weights(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "weights")
    with pytest.raises(ModelNotFound, match=r"has no \*\.safetensors"):
        open_model(str(tiny))
    (tiny / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="pickled weights"):
        open_model(str(tiny))
    (tiny / "weights").rename(tiny / "other-name.safetensors")
    assert UP_PROJ in open_model(str(tiny)).tensor_names()


@pytest.mark.parametrize(
    ("index", "error", "reason"),
    [
        ("{", CorruptModel, "not JSON"),
        ("{}", CorruptModel, "weight_map is missing"),
        ('{"weight_map": []}', CorruptModel, "weight_map is missing"),
        ('{"weight_map": {"a": 1}}', CorruptModel, "no name of"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', CorruptModel, "no name of"),
        ('{"weight_map": {"a": "/etc/passwd"}}', CorruptModel, "no name of"),
        ('{"weight_map": {"a": ".."}}', CorruptModel, "no name of"),
        ('{"weight_map": {"a": "absent.safetensors"}}', ModelNotFound, "absent.safetensors"),
        (
            '{"weight_map": {"a": "model.safetensors", "b": "copy.safetensors"}}',
            CorruptModel,
            "in two files",
        ),
    ],
)
def test_indexes_that_are_refused(
    tiny: Path, index: str, error: type[ModelError], reason: str
) -> None:
    shutil.copy(tiny / "model.safetensors", tiny / "copy.safetensors")
    (tiny / "model.safetensors.index.json").write_text(index)
    with pytest.raises(error, match=reason):
        open_model(str(tiny))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_by_transformers(tmp_path: Path, sharded: bool, tied: bool, dtype: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rope_parameters={"rope_type": "default", "rope_theta": 12345.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
        )
    ).to(getattr(torch, dtype))
    reference.save_pretrained(tmp_path, max_shard_size="40KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").is_file() == sharded
    model = open_model(str(tmp_path))
    assert (model.config.rope_theta, model.config.rms_norm_eps) == (12345.0, 1e-5)
    assert model.config.tied_head == tied
    expected = reference.state_dict()
    assert set(expected) - set(model.tensor_names()) == ({"lm_head.weight"} if tied else set())
    for name in model.tensor_names():
        assert torch.equal(model.tensor(name, dtype), expected[name]), name
        assert torch.equal(model.tensor(name, "float16"), expected[name].half()), name
