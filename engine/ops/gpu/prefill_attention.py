# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""Paged flash attention of prefill chunks: one launch for all chunks of a step.

A tile is some adjacent tokens of one chunk with all query heads of one KV head: their rows share
each K and V they load. Tiles are listed by the host (``prepare``), the longest contexts first, so
that no processor is left with a long one at the end. A chunk starts anywhere in its sequence; what
is before it is read from blocks like the chunk itself. Single rows are allowed, only slower than
through ``decode_attention``.

Knows nothing of batches. Called by ``ops``. Oracle: ``attention_tile.attend_oracle``.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.ops.gpu.attention_tile import attend_columns, load_rows
from engine.ops.gpu.configs import TileConfig, head_pad
from engine.ops.gpu.kv_format import KvView

TILE_FIELDS = 4
"""Of a row of ``tiles``: the sequence (a row of block_tables), the batch's row of the tile's first
token, how many tokens, the position of the first."""


@triton.jit(do_not_specialize=["window"])
def prefill_attention_kernel(
    output,  # *T [rows, heads, HEAD_DIM], contiguous
    queries,  # *T [rows, heads, HEAD_DIM], rows query_stride apart
    blocks,  # *T | *i8 | *u8 [num_blocks, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    scales,  # *f16 [num_blocks, 2, BLOCK_SIZE, KV_HEADS]; not read where FORMAT is PLAIN
    block_tables,  # *i32 [sequences, table_stride]
    tiles,  # *i32 [tiles, 4], see TILE_FIELDS
    query_stride,  # i32
    block_stride,  # i64
    scale_stride,  # i64
    table_stride,  # i32
    scale,  # f32
    soft_cap,  # f32; any number where HAS_SOFT_CAP is false
    window,  # i32; any number where HAS_WINDOW is false
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Grid (KV_HEADS, tiles): one KV head's rows of one tile."""
    kv_head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 4
    table = block_tables + tl.load(tile).to(tl.int64) * table_stride
    first_row = tl.load(tile + 1).to(tl.int64)
    num_tokens = tl.load(tile + 2)
    position = tl.load(tile + 3)

    m = tl.arange(0, BLOCK_M)
    token = m // GROUP
    # Rows past the tile's tokens compute the last token again, and are not stored.
    real_token = tl.minimum(token, num_tokens - 1)
    head = kv_head * GROUP + m % GROUP
    is_row = token < num_tokens
    at = (first_row + real_token) * query_stride + head * HEAD_DIM
    q = load_rows(queries, at, is_row, HEAD_DIM, HEAD_PAD, True)

    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    end = position + num_tokens
    sees_until = position + real_token + 1
    sees_from = tl.zeros_like(sees_until)
    # Columns [0, open) are in every row's sight; [open, end) in some rows'.
    start = 0
    open_from = 0
    open_until = (position + 1) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        sees_from = tl.maximum(sees_until - window, 0)
        start = tl.maximum(position + 1 - window, 0) // BLOCK_N * BLOCK_N
        open_from = (tl.maximum(end - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        open_until = tl.maximum(open_until, open_from)
        for first in range(start, tl.minimum(open_from, end), BLOCK_N):
            acc, highest, total = attend_columns(
                q, acc, highest, total, first, end, sees_from, sees_until, table, blocks,
                block_stride, scales, scale_stride, kv_head, scale, soft_cap, BLOCK_N, BLOCK_SIZE,
                KV_HEADS, HEAD_DIM, HEAD_PAD, FORMAT, HAS_SOFT_CAP, MASKED=True,
            )  # fmt: skip
    for first in range(open_from, open_until, BLOCK_N):
        acc, highest, total = attend_columns(
            q, acc, highest, total, first, end, sees_from, sees_until, table, blocks,
            block_stride, scales, scale_stride, kv_head, scale, soft_cap, BLOCK_N, BLOCK_SIZE,
            KV_HEADS, HEAD_DIM, HEAD_PAD, FORMAT, HAS_SOFT_CAP, MASKED=False,
        )  # fmt: skip
    for first in range(open_until, end, BLOCK_N):
        acc, highest, total = attend_columns(
            q, acc, highest, total, first, end, sees_from, sees_until, table, blocks,
            block_stride, scales, scale_stride, kv_head, scale, soft_cap, BLOCK_N, BLOCK_SIZE,
            KV_HEADS, HEAD_DIM, HEAD_PAD, FORMAT, HAS_SOFT_CAP, MASKED=True,
        )  # fmt: skip

    out = acc / total[:, None]
    dims = tl.arange(0, HEAD_PAD)
    at = (first_row + real_token) * (KV_HEADS * GROUP * HEAD_DIM) + head * HEAD_DIM
    tl.store(
        output + at[:, None] + dims[None, :],
        out.to(output.dtype.element_ty),
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
    )


def tokens_per_tile(config: TileConfig, group: int) -> int:
    """How many tokens one row of ``tiles`` may have."""
    return config.block_m // group


def prefill_attention(
    queries: Tensor,
    kv: KvView,
    block_tables: Tensor,
    tiles: Tensor,
    output: Tensor,
    config: TileConfig,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Attend every tile's rows; rows of no tile are left alone in ``output``.

    Args:
        queries: ``[rows, num_heads, head_dim]``; a row's heads are contiguous.
        block_tables: int32 ``[sequences, most blocks]``.
        tiles: int32 ``[tiles, 4]``, see TILE_FIELDS; at most ``tokens_per_tile`` tokens each.
        output: ``[rows, num_heads, head_dim]``, contiguous.
    """
    if not len(tiles):
        return
    _, num_heads, head_dim = queries.shape
    _, _, block_size, num_kv_heads, _ = kv.data.shape
    prefill_attention_kernel[(num_kv_heads, len(tiles))](
        output, queries, kv.data, kv.scales_or_data, block_tables, tiles,
        queries.stride(0), kv.data.stride(0), kv.scale_stride, block_tables.stride(0),
        scale, soft_cap or 0.0, window or 0,
        GROUP=num_heads // num_kv_heads, KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, HEAD_PAD=head_pad(head_dim), BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, FORMAT=kv.format,
        HAS_SOFT_CAP=soft_cap is not None, HAS_WINDOW=window is not None,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
