"""A decoder that computes a whole step in one native call.

    1  build    once, over packed weights (``weights``): rope tables, threads
    2  step     a mixed batch of prompt chunks and decode rows: KV is written layer by layer,
                logits come out for the rows that sample
    3  announce while the call runs, ``LayerCounter`` tells how many layers' KV is written, so
                that a sender on another thread ships layer i while i + 1 computes

Knows nothing of plans, sampling or schedules. Built by the runner; one step at a time.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.config import ModelConfig
from engine.errors import UnsupportedModel
from engine.kv.cache import PagedKvCache
from engine.ops.cpu import bindings
from engine.ops.cpu.build import NativeUnavailable, library
from engine.ops.cpu.instruction_sets import InstructionSet
from engine.ops.cpu.weights import PackedWeights
from engine.ops.rope import Rope
from kvtransfer.layout import KvLayout

CACHE_KINDS = {
    ("float32", "rows"): bindings.FLOAT32,
    ("bfloat16", "dot16"): bindings.BFLOAT16,
    ("int8", "dot16"): bindings.INT8,
}
"""KV layouts (dtype, order) that the kernels read."""

PAGE_TOKENS = 16
"""A block is a whole number of pages."""


class SequenceRows(NamedTuple):
    """The rows of one sequence in a step."""

    start: int
    """Position of its first row; everything before is in the cache."""
    num_rows: int
    block_table: npt.NDArray[np.int32]
    """Blocks of positions 0 .. start + num_rows - 1, at least."""


class LayerCounter:
    """How many layers of a running step have their KV written. Any thread may wait."""

    def __init__(self, native: ctypes.CDLL) -> None:
        self._native = native
        self._count = np.zeros(1, np.int32)

    @property
    def address(self) -> int:
        return self._count.ctypes.data

    @property
    def value(self) -> int:
        return int(self._count[0])

    def reset(self) -> None:
        """Before a step starts."""
        self._count[0] = 0

    def wait(self, num_layers: int, timeout_s: float) -> bool:
        """Sleep until ``num_layers`` are written; False when the time is up."""
        microseconds = int(timeout_s * 1e6)
        seen = self._native.kvr_wait_layers(self.address, num_layers, microseconds)
        return bool(seen >= num_layers)


class NativeLlama:
    """Weights packed for this machine, and the threads that multiply them.

    Args:
        max_positions: longest context; 0: what the model was trained for.
        instruction_set: None: the widest this machine runs.

    Raises:
        NativeUnavailable: no library for this machine.
        UnsupportedModel: a shape the kernels do not multiply.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: PackedWeights,
        threads: int = 1,
        max_positions: int = 0,
        instruction_set: InstructionSet | None = None,
    ) -> None:
        self.config = config
        self.native = bindings.load(library(instruction_set))
        self.weights = weights
        self._keep: list[npt.NDArray[np.float32]] = []
        self._struct = self._model_struct(max_positions or config.max_positions)
        self._context = self.native.kvr_context_new(threads)
        if not self._context:
            raise NativeUnavailable(f"native kernels: cannot start {threads} threads; use fewer")
        self._caches: dict[int, tuple[PagedKvCache, bindings.Cache, object]] = {}

    def close(self) -> None:
        """End the threads. Idempotent; no step may be running."""
        if self._context:
            self.native.kvr_context_free(self._context)
            self._context = None

    @staticmethod
    def kv_layout(config: ModelConfig, dtype: str, block_size: int) -> KvLayout:
        """The KV layout that the kernels want for a dtype: float32, bfloat16 or int8."""
        order = "rows" if dtype == "float32" else "dot16"
        return KvLayout(
            dtype, config.num_layers, config.num_kv_heads, config.head_dim, block_size, order
        )

    def layer_counter(self) -> LayerCounter:
        """One for every step that runs at the same time as its readers."""
        return LayerCounter(self.native)

    def forward(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        sequences: Sequence[SequenceRows],
        sample_rows: Sequence[int],
        cache: PagedKvCache,
        counter: LayerCounter | None = None,
    ) -> npt.NDArray[np.float32]:
        """One step; its KV is in the cache afterwards.

        Args:
            token_ids: [rows], the sequences' rows one after the other.
            sample_rows: rows whose logits are wanted.

        Returns:
            [samples, vocab_size].
        """
        step = NativeStep(self, token_ids, sequences, sample_rows, cache, counter)
        step.run_layers(0, self.config.num_layers)
        return step.logits

    def run(self, cache: PagedKvCache, step: bindings.Step) -> None:
        """The native call. The GIL is free meanwhile.

        Raises:
            ValueError: an index out of bounds; nothing was computed.
        """
        native_cache = self._cache_struct(cache)
        status = self.native.kvr_forward(
            self._context,
            ctypes.addressof(self._struct),
            ctypes.addressof(native_cache),
            ctypes.addressof(step),
        )
        if status:
            raise ValueError(f"native step refused: {bindings.STATUS_REASONS[status]}")

    @property
    def struct(self) -> bindings.Model:
        """What the native functions take for a model."""
        return self._struct

    @property
    def context(self) -> int:
        """What the native functions take for threads and scratch."""
        return int(self._context)

    def _model_struct(self, max_positions: int) -> bindings.Model:
        config, weights = self.config, self.weights
        self._layers = layers_with_rope(config, weights.layers, max_positions, self._keep)
        scale = config.attention_scale
        return bindings.Model(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_positions=max_positions,
            layers=ctypes.addressof(self._layers),
            head=weights.head,
            final_norm=weights.final_norm,
            embedding=weights.embedding,
            embedding_kind=weights.embedding_kind,
            rms_norm_eps=config.rms_norm_eps,
            embedding_scale=weights.embedding_scale,
            attention_scale=config.head_dim**-0.5 if scale is None else scale,
            attention_soft_cap=config.attention_soft_cap or 0.0,
            logits_soft_cap=config.logits_soft_cap or 0.0,
            activation=bindings.ACTIVATIONS[config.activation],
        )

    def _cache_struct(self, cache: PagedKvCache) -> bindings.Cache:
        known = self._caches.get(id(cache))
        if known is None:
            known = (cache, *cache_struct(cache))
            self._caches[id(cache)] = known
        return known[1]


class NativeStep:
    """One step that may be cut between layers, as when KV of later layers is still landing."""

    def __init__(
        self,
        model: NativeLlama,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        sequences: Sequence[SequenceRows],
        sample_rows: Sequence[int],
        cache: PagedKvCache,
        counter: LayerCounter | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        ids = np.ascontiguousarray(token_ids, np.int32)
        rows = np.ascontiguousarray(sample_rows, np.int32)
        tables = [np.ascontiguousarray(s.block_table, np.int32) for s in sequences]
        for sequence, table in zip(sequences, tables, strict=True):
            end = sequence.start + sequence.num_rows
            if cache.layout.num_blocks_for(end) > len(table):
                raise ValueError(f"a block table of {len(table)} blocks does not cover {end} rows")
        parts = (bindings.Sequence * len(sequences))()
        for part, sequence, table in zip(parts, sequences, tables, strict=True):
            part.num_rows, part.start = sequence.num_rows, sequence.start
            part.block_table = table.ctypes.data
        self.logits = np.empty((len(rows), model.config.vocab_size), np.float32)
        hidden = np.empty((len(ids), model.config.hidden_size), np.float32)
        self._keep = (ids, rows, tables, parts, hidden, counter)
        self._struct = bindings.Step(
            token_ids=ids.ctypes.data,
            sequences=ctypes.addressof(parts),
            sample_rows=rows.ctypes.data,
            logits=self.logits.ctypes.data,
            hidden=hidden.ctypes.data,
            layers_written=counter.address if counter else None,
            num_rows=len(ids),
            num_sequences=len(sequences),
            num_samples=len(rows),
        )

    def run_layers(self, first: int, end: int) -> None:
        """Layers first .. end - 1; the first call starts at 0, the last ends with the logits."""
        self._struct.first_layer, self._struct.end_layer = first, end
        self._model.run(self._cache, self._struct)

    def logits_of(self, rows: Sequence[int]) -> npt.NDArray[np.float32]:
        """Of any rows, once all layers have run: ``[rows, vocab_size]``."""
        wanted = np.ascontiguousarray(rows, np.int32)
        logits = np.empty((len(wanted), self._model.config.vocab_size), np.float32)
        layers = self._model.config.num_layers
        self._struct.sample_rows, self._struct.logits = wanted.ctypes.data, logits.ctypes.data
        self._struct.num_samples = len(wanted)
        try:
            self.run_layers(layers, layers)
        finally:
            sampled = self._keep[1]
            self._struct.sample_rows = sampled.ctypes.data
            self._struct.logits = self.logits.ctypes.data
            self._struct.num_samples = len(sampled)
        return logits


def check_block_size(block_size: int) -> None:
    """Raises: UnsupportedModel: a block is not a whole number of pages."""
    if block_size % PAGE_TOKENS:
        raise UnsupportedModel(
            f"native kernels: block size {block_size} is not a multiple of {PAGE_TOKENS}"
        )


def cache_struct(cache: PagedKvCache) -> tuple[bindings.Cache, object]:
    """A cache for the kernels, and what must live as long as that.

    Raises:
        ValueError: a layout the kernels do not read.
    """
    layout = cache.layout
    kind = CACHE_KINDS.get((layout.dtype, layout.order))
    if kind is None:
        raise ValueError(f"native kernels do not read KV of {layout.dtype} in order {layout.order}")
    check_block_size(layout.block_size)
    addresses = (ctypes.c_void_p * layout.num_layers)(
        *(cache.address(i) for i in range(layout.num_layers))
    )
    struct = bindings.Cache(
        ctypes.addressof(addresses), layout.region_bytes, cache.num_blocks, layout.block_size, kind
    )
    return struct, addresses


def layers_with_rope(
    config: ModelConfig,
    layers: "ctypes.Array[bindings.Layer]",
    max_positions: int,
    keep: list[npt.NDArray[np.float32]],
) -> "ctypes.Array[bindings.Layer]":
    """A copy of the layers that points at rope tables of ``max_positions``, put into ``keep``."""
    copied = type(layers).from_buffer_copy(layers)
    kinds = {config.has_local_rope(i) for i in range(len(copied))}
    tables = {is_local: rope_tables(config, max_positions, is_local) for is_local in kinds}
    for i, layer in enumerate(copied):
        cosines, sines = tables[config.has_local_rope(i)]
        layer.cosines, layer.sines = cosines.ctypes.data, sines.ctypes.data
    keep += [table for pair in tables.values() for table in pair]
    return copied


def rope_tables(
    config: ModelConfig, max_positions: int, is_local: bool
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines, [max_positions, head_dim / 2] each, computed as the torch model does."""
    cosines, sines = Rope(config, is_local).angles(torch.arange(max_positions))
    return cosines.numpy(), sines.numpy()
