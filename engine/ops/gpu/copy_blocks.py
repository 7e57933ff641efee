# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""Whole blocks from one place to another: forks, and staging for a transport.

A region is copied byte for byte, whatever is in it, scales included. Knows nothing of formats.
Called by ``ops``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.gpu.configs import COPY


@triton.jit
def copy_blocks_kernel(
    target,  # *i32 [blocks, words], blocks target_stride apart
    source,  # *i32 [blocks, words], blocks source_stride apart
    target_ids,  # *i64 [pairs]
    source_ids,  # *i64 [pairs]
    target_stride,  # i64: words
    source_stride,  # i64: words
    words,  # i32: of a block
    BLOCK: tl.constexpr,
):
    """Grid (pairs, ceil(words / BLOCK)): some words of one block."""
    pair = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_word = at < words
    source_id = tl.load(source_ids + pair)
    target_id = tl.load(target_ids + pair)
    copied = tl.load(source + source_id * source_stride + at, mask=is_word, other=0)
    tl.store(target + target_id * target_stride + at, copied, mask=is_word)


def copy_blocks(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copy regions ``source_ids[i]`` of ``source`` to ``target_ids[i]`` of ``target``.

    Args:
        source, target: one layer, or a staging buffer: ``[blocks, ...]`` with contiguous regions
            of equally many bytes, a multiple of four. They may be the same tensor; then no block
            may be both read and written, and none written twice.
        source_ids, target_ids: int64 ``[pairs]``, on the device.
    """
    if not len(source_ids):
        return
    source_words, target_words = _words(source), _words(target)
    words = source_words.shape[1]
    copy_blocks_kernel[(len(source_ids), triton.cdiv(words, COPY.block_n))](
        target_words, source_words, target_ids, source_ids,
        target_words.stride(0), source_words.stride(0), words,
        BLOCK=COPY.block_n, num_warps=COPY.num_warps, num_stages=COPY.num_stages,
    )  # fmt: skip


def copy_blocks_oracle(
    source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor
) -> None:
    """The same, by indexing."""
    target[target_ids] = source[source_ids]


def _words(blocks: Tensor) -> Tensor:
    """``[blocks, words]`` of int32, without a copy."""
    return blocks.view(len(blocks), -1).view(torch.int32)
