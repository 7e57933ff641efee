"""What a step's attention needs on the device, worked out once on the host.

Single rows are listed for the decode kernel, chunks are cut into tiles for the prefill kernel; a
mixed batch is both. All lists go to the device in one copy that nobody waits for.

Knows nothing of triton. Called by ``ops``.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.ops.batch import Batch, Span
from engine.ops.gpu.configs import power_of_two

# Pointers are aligned to 16 bytes, or kernels would be compiled again for those that are not.
_ALIGN = 4


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """Single rows of several sequences; all int32."""

    rows: Tensor
    """``[sequences]``: of the batch."""
    contexts: Tensor
    """``[sequences]``: positions each sees."""
    block_tables: Tensor
    """``[sequences, most blocks]``."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillTiles:
    """Chunks of several sequences, cut; all int32."""

    tiles: Tensor
    """``[tiles, 4]``, see ``prefill_attention.TILE_FIELDS``."""
    block_tables: Tensor
    """``[sequences, most blocks]``."""


def list_steps(
    batch: Batch, block_size: int, tokens_per_tile: int, device: torch.device
) -> tuple[DecodeRows, PrefillTiles]:
    """The batch's spans as both kernels want them."""
    singles = [span for span in batch.spans if span.num_rows == 1]
    chunks = [span for span in batch.spans if span.num_rows > 1]
    lists = (
        np.array([span.first_row for span in singles], dtype=np.int32),
        np.array([span.end for span in singles], dtype=np.int32),
        _block_tables(singles, block_size),
        cut_tiles(chunks, tokens_per_tile),
        _block_tables(chunks, block_size),
    )
    rows, contexts, decode_tables, tiles, chunk_tables = to_device(lists, device)
    return DecodeRows(rows, contexts, decode_tables), PrefillTiles(tiles, chunk_tables)


def cut_tiles(chunks: list[Span], tokens_per_tile: int) -> np.ndarray:
    """int32 ``[tiles, 4]``: the longest contexts first, whoever they belong to."""
    tiles = [
        (i, span.first_row + token, min(tokens_per_tile, span.num_rows - token), span.start + token)
        for i, span in enumerate(chunks)
        for token in range(0, span.num_rows, tokens_per_tile)
    ]
    tiles.sort(key=lambda tile: -(tile[2] + tile[3]))
    return np.array(tiles, dtype=np.int32).reshape(-1, 4)


def to_device(arrays: tuple[np.ndarray, ...], device: torch.device) -> list[Tensor]:
    """int32 arrays as views of one tensor on the device, copied at once."""
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.size // _ALIGN) * _ALIGN
    # Pinned, or the copy would wait for the device.
    host = torch.zeros(total, dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = host.numpy()
    for start, array in zip(starts, arrays, strict=True):
        flat[start : start + array.size] = array.ravel()
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.size].view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def _block_tables(spans: list[Span], block_size: int) -> np.ndarray:
    """int32 ``[sequences, most blocks]``; padded to a power of two, so that widths are few."""
    counts = [-(-span.end // block_size) for span in spans]
    tables = np.zeros((len(spans), power_of_two(max(counts, default=1))), dtype=np.int32)
    for row, span, count in zip(tables, spans, counts, strict=True):
        row[:count] = span.block_table[:count]
    return tables
