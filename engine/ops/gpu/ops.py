# mypy: disable-error-code="import-not-found, import-untyped"
"""The kernels behind the seam of ``engine.ops.interface``, and what they can do beyond it.

On a CUDA (or ROCm) device; on CPU tensors only in triton's interpreter, for tests. Matrix products
are torch's. No call waits for the device.

Knows nothing of models. Importing this needs triton; nobody outside ``engine.ops.gpu`` does so
before a device is chosen.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.errors import ModelError
from engine.ops.batch import Batch
from engine.ops.gpu import activation, norm, rotary
from engine.ops.gpu.configs import (
    BLOCK_SIZES,
    CHIPS,
    HEAD_DIMS,
    Chip,
    TileConfig,
    choose_num_splits,
    decode_config,
    prefill_config,
)
from engine.ops.gpu.decode_attention import Partials, decode_attention, make_partials
from engine.ops.gpu.kv_format import PLAIN, KvView
from engine.ops.gpu.prefill_attention import prefill_attention, tokens_per_tile
from engine.ops.gpu.prepare import DecodeRows, PrefillTiles, list_steps
from engine.ops.interface import Linear
from kvtransfer.layout import KvLayout


@dataclass(frozen=True, slots=True, eq=False)
class PreparedAttention:
    """All a step's attention needs besides queries and KV."""

    decode: DecodeRows
    partials: Partials
    prefill: PrefillTiles


class GpuOps:
    """Implements ``engine.ops.interface.Ops``.

    Args:
        device: of all tensors.
        kv_format: PLAIN, INT8 or FP8: of every layer that ``attention`` is given.
        num_splits: into how many parts every decode row's context is cut, a power of two; a row's
            result is then the same in any batch. None: as many as keep the device busy.

    Raises:
        ModelError: the device cannot run the kernels.
    """

    def __init__(
        self, device: torch.device | str, kv_format: int = PLAIN, num_splits: int | None = None
    ) -> None:
        self.device = torch.device(device)
        self.chip = _chip(self.device)
        self._kv_format = kv_format
        self._num_splits = num_splits

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return lambda x: F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum; all ``[rows, columns]``."""
        return norm.add_rms_norm(x, residual, weight, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotary.rotate(x, cos, sin)

    def rotate_and_store(
        self, heads: Tensor, cos: Tensor, sin: Tensor, layer: Tensor | KvView, key_rows: Tensor
    ) -> Tensor:
        """Rotary and the KV write in one launch, see ``rotary.rotate_and_store``."""
        return rotary.rotate_and_store(heads, cos, sin, _view(layer), key_rows)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return activation.silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return activation.gelu_mul(gate_up)

    def prepare_attention(
        self, batch: Batch, layout: KvLayout, num_heads: int
    ) -> PreparedAttention:
        """``layout.dtype`` is that of the queries, also where KV is quantised.

        Raises:
            ModelError: no kernel for these heads, blocks or dtypes.
        """
        check_shapes(layout.head_dim, layout.block_size)
        element_bytes = getattr(torch, layout.dtype).itemsize
        if self._kv_format != PLAIN and element_bytes == 4:
            raise ModelError("float32 queries over 8 bit KV: the GPU kernels have no tiles for it")
        group = num_heads // layout.num_kv_heads
        config = self._prefill_config(layout.head_dim, element_bytes)
        tokens = tokens_per_tile(config, group)
        if not tokens:
            raise ModelError(
                f"{group} query heads share a KV head: the kernels take at most {config.block_m}"
            )
        decode, prefill = list_steps(batch, layout.block_size, tokens, self.device)
        num_rows = len(decode.rows)
        num_splits = self._num_splits or choose_num_splits(num_rows, layout.num_kv_heads, self.chip)
        partials = make_partials(num_rows, num_heads, layout.head_dim, num_splits, self.device)
        return PreparedAttention(decode, partials, prefill)

    def attention(
        self,
        queries: Tensor,
        layer: Tensor | KvView,
        prepared: PreparedAttention,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Beyond the seam: quantised KV."""
        num_rows, num_heads, head_dim = queries.shape
        output = queries.new_empty((num_rows, num_heads, head_dim))
        kv = _view(layer)
        scale = head_dim**-0.5 if scale is None else scale
        size = queries.element_size()
        decode_attention(
            queries, kv, prepared.decode.block_tables, prepared.decode.rows,
            prepared.decode.contexts, prepared.partials, output,
            decode_config(head_dim, size, self.chip), scale, window, soft_cap,
        )  # fmt: skip
        prefill_attention(
            queries, kv, prepared.prefill.block_tables, prepared.prefill.tiles, output,
            self._prefill_config(head_dim, size), scale, window, soft_cap,
        )  # fmt: skip
        return output.flatten(1)

    def _prefill_config(self, head_dim: int, element_bytes: int) -> TileConfig:
        return prefill_config(head_dim, element_bytes, self._kv_format != PLAIN, self.chip)


def check_shapes(head_dim: int, block_size: int) -> None:
    """Raises ModelError: the kernels are not made, and not tested, for this."""
    if head_dim not in HEAD_DIMS:
        raise ModelError(f"head_dim {head_dim}: the GPU kernels have {_listed(HEAD_DIMS)}")
    if block_size not in BLOCK_SIZES:
        raise ModelError(f"block_size {block_size}: the GPU kernels have {_listed(BLOCK_SIZES)}")


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _view(layer: Tensor | KvView) -> KvView:
    return layer if isinstance(layer, KvView) else KvView(layer)


def _chip(device: torch.device) -> Chip:
    if device.type == "cpu":
        if not triton.knobs.runtime.interpret:
            raise ModelError("GPU kernels on the CPU: only in triton's interpreter, for tests")
        return CHIPS["sm_90"]
    if torch.version.hip is not None:
        return CHIPS["gfx942"]
    major, _ = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ModelError(
            f"{torch.cuda.get_device_name(device)}: compute capability {major}.x; 8.0 is needed"
        )
    return CHIPS["sm_80" if major == 8 else "sm_90" if major == 9 else "sm_100"]
