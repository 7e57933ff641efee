"""The C ABI of ``native/abi.h`` for ctypes: structs field by field, and functions with their types.

Knows no model and checks nothing: callers keep alive what they point to. ctypes releases the GIL
for the length of every call. Called by ``native_model`` and by the kernels' tests.
"""

import ctypes
from pathlib import Path

ABI_VERSION = 4

FLOAT32, BFLOAT16, INT8, Q8_0, Q4_0, Q4_1 = range(6)
ACTIVATIONS = {"silu": 0, "gelu": 1}
KIND_NAMES = ("float32", "bfloat16", "int8", "Q8_0", "Q4_0", "Q4_1")

STATUS_REASONS = {
    1: "a token id is outside the vocabulary",
    2: "a position is outside the rope tables",
    3: "a block id is outside the KV cache",
    4: "the sequences do not cover the rows in order",
    5: "the layer range is outside the model",
    6: "no memory for scratch",
}

Pointer = ctypes.c_void_p
Int = ctypes.c_int32


class Linear(ctypes.Structure):
    """KvrLinear."""

    _fields_ = (
        ("panels", Pointer),
        ("bias", Pointer),
        ("outputs", Int),
        ("inputs", Int),
        ("kind", Int),
        ("reserved", Int),
    )


class Layer(ctypes.Structure):
    """KvrLayer."""

    _fields_ = (
        ("qkv", Linear),
        ("attention_out", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("attention_norm", Pointer),
        ("mlp_norm", Pointer),
        ("query_norm", Pointer),
        ("key_norm", Pointer),
        ("attention_post_norm", Pointer),
        ("mlp_post_norm", Pointer),
        ("cosines", Pointer),
        ("sines", Pointer),
        ("window", Int),
        ("reserved", Int),
    )


class Model(ctypes.Structure):
    """KvrModel."""

    _fields_ = (
        ("num_layers", Int),
        ("hidden_size", Int),
        ("intermediate_size", Int),
        ("num_heads", Int),
        ("num_kv_heads", Int),
        ("head_dim", Int),
        ("vocab_size", Int),
        ("max_positions", Int),
        ("layers", Pointer),
        ("head", Linear),
        ("final_norm", Pointer),
        ("embedding", Pointer),
        ("embedding_kind", Int),
        ("rms_norm_eps", ctypes.c_float),
        ("embedding_scale", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        ("attention_soft_cap", ctypes.c_float),
        ("logits_soft_cap", ctypes.c_float),
        ("activation", Int),
    )


class Cache(ctypes.Structure):
    """KvrCache."""

    _fields_ = (
        ("layers", Pointer),
        ("region_bytes", ctypes.c_int64),
        ("num_blocks", Int),
        ("block_size", Int),
        ("kind", Int),
        ("reserved", Int),
    )


class Sequence(ctypes.Structure):
    """KvrSequence."""

    _fields_ = (("num_rows", Int), ("start", Int), ("block_table", Pointer))


class Step(ctypes.Structure):
    """KvrStep."""

    _fields_ = (
        ("token_ids", Pointer),
        ("sequences", Pointer),
        ("sample_rows", Pointer),
        ("logits", Pointer),
        ("hidden", Pointer),
        ("layers_written", Pointer),
        ("num_rows", Int),
        ("num_sequences", Int),
        ("num_samples", Int),
        ("first_layer", Int),
        ("end_layer", Int),
        ("reserved", Int),
    )


_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "kvr_abi_version": (Int, ()),
    "kvr_instruction_set": (ctypes.c_char_p, ()),
    "kvr_context_new": (Pointer, (Int,)),
    "kvr_context_free": (None, (Pointer,)),
    "kvr_forward": (Int, (Pointer, Pointer, Pointer, Pointer)),
    "kvr_wait_layers": (Int, (Pointer, Int, ctypes.c_int64)),
    "kvr_linear": (Int, (Pointer, Pointer, Pointer, Int, Int, Pointer)),
    "kvr_gated_mlp": (Int, (Pointer, Pointer, Pointer, Int, Pointer, Int, Pointer)),
    "kvr_rms_norm": (None, (Pointer, Pointer, Int, Int, ctypes.c_float, Pointer)),
    "kvr_embed": (None, (Pointer, Pointer, Int, Pointer)),
    "kvr_attention": (Int, (Pointer, Pointer, Pointer, Int, Pointer, Pointer, Pointer)),
}


def load(path: Path) -> ctypes.CDLL:
    """The library at ``path``, its functions typed."""
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    found = loaded.kvr_abi_version()
    if found != ABI_VERSION:
        raise RuntimeError(f"{path.name}: ABI {found}, these bindings speak {ABI_VERSION}")
    return loaded
