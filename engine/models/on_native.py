"""The native kernels behind the runner's seam: one call a step.

While the call runs, without the GIL, a second thread sleeps until the next layer's KV is written
and tells the listener. It exists only while somebody listens, which decode steps never do.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from engine.kv.cache import PagedKvCache
from engine.loaders.files import ModelFiles
from engine.loaders.gguf_model import GgufModel
from engine.models.interface import OnLayer, OtherRows
from engine.ops.cpu.native_model import LayerCounter, NativeLlama, NativeStep, SequenceRows
from engine.ops.cpu.pack import RawBlocks, is_packable
from engine.plan import ScheduledSequence

LAYER_TIMEOUT_S = 0.05
"""How long the watcher sleeps before it looks whether the step has failed."""


class FileWeights:
    """A model's files as the native kernels take them."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files

    def tensor(self, name: str, dtype: str) -> Tensor:
        return self._files.tensor(name, dtype)

    def raw(self, name: str) -> RawBlocks | None:
        """The file's own blocks, rows in Hugging Face's order; None where they are of no use."""
        if not isinstance(self._files, GgufModel):
            return None
        data, type_name, shape = self._files.raw(name)
        if not is_packable(type_name):
            return None
        blocks = RawBlocks(type_name, data.reshape(shape[0], -1))
        order = self._files.row_order(name)
        return blocks if order is None else blocks.take_rows(order)

    @property
    def has_blocks(self) -> bool:
        """Whether the layers' matrices are in such blocks, or the head: half a small model."""
        tied = self._files.config.tied_head
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return any(
            self.raw(name) is not None for name in ("model.layers.0.mlp.down_proj.weight", head)
        )


class NativeModel:
    """Implements ``engine.models.interface.StepModel``."""

    def __init__(self, native: NativeLlama) -> None:
        self._native = native
        self._counter = native.layer_counter()
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="layer-watcher")

    def step(
        self,
        sequences: tuple[ScheduledSequence, ...],
        cache: PagedKvCache,
        on_layer: OnLayer | None,
        others: OtherRows | None = None,
    ) -> Tensor:
        token_ids = [token for s in sequences for token in s.token_ids]
        rows = [
            SequenceRows(s.start, len(s.token_ids), np.array(s.block_table, np.int32))
            for s in sequences
        ]
        ends = np.cumsum([r.num_rows for r in rows])
        sample_rows = [int(end) - 1 for s, end in zip(sequences, ends, strict=True) if s.samples]
        counter = self._counter if on_layer is not None else None
        step = NativeStep(self._native, token_ids, rows, sample_rows, cache, counter)
        if on_layer is None:
            step.run_layers(0, self._native.config.num_layers)
        else:
            self._watched(step, on_layer)
        if others is not None:
            for block in others.blocks():
                others.take(torch.from_numpy(step.logits_of(block)))
        return torch.from_numpy(step.logits)

    def _watched(self, step: NativeStep, on_layer: OnLayer) -> None:
        num_layers = self._native.config.num_layers
        watch = _Watch(self._counter, num_layers, on_layer)
        told = self._watcher.submit(watch.run)
        try:
            step.run_layers(0, num_layers)
        finally:
            # Every layer is told before the step's result is: a FIRST never precedes its KV's end.
            watch.stop()
            told.result()


class _Watch:
    """Tells layers in order, each once, as the counter says they are written."""

    def __init__(self, counter: LayerCounter, num_layers: int, on_layer: OnLayer) -> None:
        self._counter = counter
        self._num_layers = num_layers
        self._on_layer = on_layer
        self._is_over = False
        counter.reset()

    def run(self) -> None:
        for layer in range(self._num_layers):
            while not self._counter.wait(layer + 1, LAYER_TIMEOUT_S):
                if self._is_over and self._counter.value <= layer:
                    return  # the step failed before this layer
            self._on_layer(layer)

    def stop(self) -> None:
        """The native call is over: no more layers will come."""
        self._is_over = True
