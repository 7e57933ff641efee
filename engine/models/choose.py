"""Which implementation of a model runs here: native kernels where they can, torch otherwise.

Knows both, and nothing of steps. Called by the runner.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig, ModelConfig
from engine.errors import ModelError, UnsupportedModel
from engine.loaders.files import ModelFiles
from engine.models.decoder import Decoder
from engine.models.interface import StepModel
from engine.models.on_native import FileWeights, NativeModel
from engine.models.on_torch import TorchModel
from engine.ops.cpu.build import NativeUnavailable, library
from engine.ops.cpu.native_model import NativeLlama, check_block_size
from engine.ops.cpu.weights import PackedWeights, check_shapes
from engine.ops.torch_cpu import TorchCpuOps
from engine.recipe import Machine, Recipe, resolve_recipe
from kvtransfer.layout import KvLayout

log = logging.getLogger(__name__)

Weights = PackedWeights | Decoder
"""A model's weights in memory. Nothing writes to them: processes may share them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How a model will be run; nothing is loaded yet."""

    recipe: Recipe
    layout: KvLayout
    is_native: bool


def choose(config: EngineConfig, files: ModelFiles) -> Choice:
    """Settle recipe, KV layout and implementation.

    Raises:
        ModelError: what is asked for cannot be computed here.
    """
    is_native = config.kernels != "torch" and _native_runs(files, config.block_size)
    if config.deterministic and not is_native:
        # Torch's products sum in an order that depends on how many rows there are.
        raise ModelError(
            "deterministic: only the native kernels compute a row alike in every batch, and they "
            "do not run here; drop --deterministic"
        )
    machine = Machine(
        has_native=is_native,
        has_bfloat16=cpu_multiplies_bfloat16(),
        has_blocks=FileWeights(files).has_blocks,
    )
    recipe = resolve_recipe(config.weights, config.dtype, config.kv_dtype, machine)
    if is_native:
        layout = NativeLlama.kv_layout(files.config, recipe.kv_dtype, config.block_size)
    else:
        layout = files.config.kv_layout(recipe.kv_dtype, config.block_size)
    return Choice(recipe, layout, is_native)


def read_weights(config: EngineConfig, files: ModelFiles) -> Weights:
    """Read and pack the weights, as what will compute with them wants them. Starts no thread.

    Raises:
        ModelError: what is asked for cannot be computed here.
    """
    choice = choose(config, files)
    if choice.is_native:
        return PackedWeights(files.config, FileWeights(files), choice.recipe.weights)
    with torch.inference_mode():
        model = files.config.stretched(config.max_context)
        return Decoder(model, files, TorchCpuOps(), choice.recipe.dtype)


def build(weights: Weights, config: ModelConfig, threads: int, max_context: int) -> StepModel:
    """What computes steps with these weights."""
    if isinstance(weights, PackedWeights):
        return NativeModel(NativeLlama(config, weights, threads, max_positions=max_context))
    return TorchModel(weights)


def _native_runs(files: ModelFiles, block_size: int) -> bool:
    """Whether the native kernels run this model here; says once why not."""
    try:
        check_shapes(files.config)
        check_block_size(block_size)
        library()
    except (NativeUnavailable, UnsupportedModel) as reason:
        log.warning("%s; torch computes instead, several times slower", reason)
        return False
    return True


def cpu_multiplies_bfloat16() -> bool:
    """Whether the processor has AVX-512 BF16, AMX BF16 or the Arm equivalent, and torch uses it."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
