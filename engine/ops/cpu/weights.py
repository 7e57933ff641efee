"""A model's weights as the native kernels read them: one arena, in the order a step reads it.

Decides per matrix how it is stored, given the recipe. Knows names and shapes of decoders, not how
anything is computed. Called by ``native_model``.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import UnsupportedModel
from engine.ops.cpu import bindings, pack
from engine.ops.cpu.memory import Arena, padded

RECIPES = ("float32", "bf16", "int8", "file")
"""float32: exact, and the arithmetic too. bf16. int8: groups of 64, activations likewise.
file: GGUF blocks as they are with int8 activations per block; what is not in blocks is bf16."""

PREFETCHED_BYTES = 16384
"""How far past a matrix the kernels may prefetch (never load)."""

HEAD_DIM_STEP, LARGEST_HEAD_DIM = 16, 256
INPUT_STEP = 32
NORM_STEP = 32
Array = npt.NDArray[np.generic]
T = TypeVar("T", bound=np.generic)


class WeightSource(Protocol):
    """Named matrices under Hugging Face's names, rows of q and k in its order."""

    def tensor(self, name: str, dtype: str) -> Tensor: ...

    def raw(self, name: str) -> pack.RawBlocks | None:
        """The file's own blocks; None where they are of no packable type."""
        ...


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """One packed matrix: which rows of which tensors, stored how."""

    names: tuple[str, ...]
    """Stacked in this order; two for gate and up, which are interleaved."""
    outputs: int
    inputs: int
    kind: int
    interleaved: bool = False
    has_bias: bool = False

    @property
    def num_bytes(self) -> int:
        return pack.packed_bytes(self.kind, self.outputs, self.inputs)


class PackedWeights:
    """All weights of a model, packed; owns their memory.

    Raises:
        UnsupportedModel: a shape the kernels do not multiply.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, recipe: str) -> None:
        check_shapes(config)
        self._config = config
        self._source = source
        self._recipe = recipe
        self._keep: list[Array] = []
        layer_plans = [self._layer_plans(i) for i in range(config.num_layers)]
        head_name = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
        head_plan = self._plan((head_name,), config.vocab_size, config.hidden_size)
        every_plan = [*(plan for plans in layer_plans for plan in plans), head_plan]
        self.num_bytes = sum(padded(plan.num_bytes) for plan in every_plan)
        # The kernels prefetch past the end of what they read.
        self._arena = Arena(self.num_bytes + PREFETCHED_BYTES)
        self.layers = (bindings.Layer * config.num_layers)()
        for i, plans in enumerate(layer_plans):
            self.layers[i] = self._layer(i, plans)
        self.head = self._linear(head_plan)
        self.final_norm = self._norm("model.norm")
        self.embedding, self.embedding_kind = self._embedding()
        self.embedding_scale = self._embedding_scale()
        self.kinds = {bindings.KIND_NAMES[plan.kind] for plan in every_plan}

    def keep(self, array: Array) -> int:
        """The address of an array that lives as long as the weights."""
        self._keep.append(array)
        return array.ctypes.data

    def _layer_plans(self, i: int) -> tuple[MatrixPlan, ...]:
        config, name = self._config, f"model.layers.{i}."
        hidden, ffn = config.hidden_size, config.intermediate_size
        queries = config.num_heads * config.head_dim
        qkv = tuple(f"{name}self_attn.{p}_proj.weight" for p in "qkv")
        gate_up = (f"{name}mlp.gate_proj.weight", f"{name}mlp.up_proj.weight")
        return (
            self._plan(
                qkv,
                queries + 2 * config.num_kv_heads * config.head_dim,
                hidden,
                has_bias=config.qkv_bias,
            ),
            self._plan(
                (f"{name}self_attn.o_proj.weight",), hidden, queries, has_bias=config.output_bias
            ),
            self._plan(gate_up, 2 * ffn, hidden, interleaved=True, has_bias=config.mlp_bias),
            self._plan((f"{name}mlp.down_proj.weight",), hidden, ffn, has_bias=config.mlp_bias),
        )

    def _plan(
        self,
        names: tuple[str, ...],
        outputs: int,
        inputs: int,
        interleaved: bool = False,
        has_bias: bool = False,
    ) -> MatrixPlan:
        kind = self._kind(names, inputs)
        return MatrixPlan(names, outputs, inputs, kind, interleaved, has_bias)

    def _kind(self, names: tuple[str, ...], inputs: int) -> int:
        """How a matrix is stored. Stacked tensors of unlike or unknown blocks become bfloat16."""
        if self._recipe == "float32":
            return bindings.FLOAT32
        if self._recipe == "int8":
            return bindings.INT8 if inputs % pack.INT8_GROUP == 0 else bindings.Q8_0
        if self._recipe == "file":
            stored = [self._source.raw(name) for name in names]
            kinds = {blocks.kind if blocks else bindings.BFLOAT16 for blocks in stored}
            return kinds.pop() if len(kinds) == 1 else bindings.BFLOAT16
        return bindings.BFLOAT16

    def _layer(self, i: int, plans: tuple[MatrixPlan, ...]) -> bindings.Layer:
        """All of a layer but its rope tables, which depend on the longest context."""
        config, name = self._config, f"model.layers.{i}."
        mlp_norm, post = "post_attention_layernorm", config.post_norms
        if post:
            mlp_norm = "pre_feedforward_layernorm"
        qkv, attention_out, gate_up, down = (self._linear(plan) for plan in plans)
        return bindings.Layer(
            qkv,
            attention_out,
            gate_up,
            down,
            attention_norm=self._norm(f"{name}input_layernorm"),
            mlp_norm=self._norm(f"{name}{mlp_norm}"),
            query_norm=self._norm(f"{name}self_attn.q_norm") if config.head_norms else None,
            key_norm=self._norm(f"{name}self_attn.k_norm") if config.head_norms else None,
            attention_post_norm=self._norm(f"{name}post_attention_layernorm") if post else None,
            mlp_post_norm=self._norm(f"{name}post_feedforward_layernorm") if post else None,
            window=config.window(i) or 0,
        )

    def _norm(self, name: str) -> int:
        """The address of a norm's weights, whole."""
        stored = self._floats(f"{name}.weight")
        if self._config.norms_add_one:
            stored = np.add(stored, 1, dtype=np.float32)
        return self.keep(stored)

    def _bias(self, plan: MatrixPlan) -> int | None:
        """The address of the bias, in the order of the packed outputs."""
        if not plan.has_bias:
            return None
        names = (name.removesuffix("weight") + "bias" for name in plan.names)
        columns = [self._floats(name).reshape(-1, 1) for name in names]
        return self.keep(np.ascontiguousarray(_stacked(columns, plan).ravel()))

    def _linear(self, plan: MatrixPlan) -> bindings.Linear:
        out = self._arena.take(plan.num_bytes)
        if self._recipe == "file" and plan.kind != bindings.BFLOAT16:
            blocks = [self._source.raw(name) for name in plan.names]
            parts = [part.data for part in blocks if part is not None]
            type_name = bindings.KIND_NAMES[plan.kind]
            pack.pack_blocks(pack.RawBlocks(type_name, _stacked(parts, plan)), out)
        else:
            read = self._bfloat16 if plan.kind == bindings.BFLOAT16 else self._floats
            pack.pack_floats(_stacked([read(name) for name in plan.names], plan), plan.kind, out)
        bias = self._bias(plan)
        return bindings.Linear(out.ctypes.data, bias, plan.outputs, plan.inputs, plan.kind)

    def _floats(self, name: str) -> Array:
        return np.ascontiguousarray(self._source.tensor(name, "float32").numpy())

    def _bfloat16(self, name: str) -> Array:
        bits = self._source.tensor(name, "bfloat16").contiguous().view(torch.int16)
        return bits.numpy().view(np.uint16)

    def _embedding(self) -> tuple[int, int]:
        """Address and kind of the rows that tokens look up: as stored where that is Q8_0."""
        name = "model.embed_tokens.weight"
        blocks = self._source.raw(name)
        if blocks is not None and blocks.kind == bindings.Q8_0:
            return self.keep(np.ascontiguousarray(blocks.data)), bindings.Q8_0
        if self._recipe == "float32":
            return self.keep(self._floats(name)), bindings.FLOAT32
        return self.keep(np.ascontiguousarray(self._bfloat16(name))), bindings.BFLOAT16

    def _embedding_scale(self) -> float:
        """As models are trained: rounded to bfloat16, unless all is float32."""
        scale = torch.tensor(self._config.embedding_scale)
        return float(scale if self._recipe == "float32" else scale.bfloat16())


def _stacked(parts: list[npt.NDArray[T]], plan: MatrixPlan) -> npt.NDArray[T]:
    if plan.interleaved:
        return pack.interleave_gate_up(*parts)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def check_shapes(config: ModelConfig) -> None:
    """Refuse what the kernels do not compute.

    Raises:
        UnsupportedModel: names the first such number.
    """
    if config.head_norms and config.head_dim % NORM_STEP:
        raise UnsupportedModel(
            f"native kernels: no norms of heads of {config.head_dim}; the torch path serves it"
        )
    if config.head_dim % HEAD_DIM_STEP or config.head_dim > LARGEST_HEAD_DIM:
        raise UnsupportedModel(
            f"native kernels: head_dim {config.head_dim} is not a multiple of {HEAD_DIM_STEP} "
            f"up to {LARGEST_HEAD_DIM}; the torch path serves it"
        )
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads * head_dim": config.num_heads * config.head_dim,
    }
    for name, width in widths.items():
        if width % INPUT_STEP:
            raise UnsupportedModel(
                f"native kernels: {name} {width} is not a multiple of {INPUT_STEP}; "
                "the torch path serves it"
            )
