"""What each kernel must move, what it asks for, and what it computes: counted from shapes.

``needed``: every input once and every output once, whatever the kernel. ``moved``: what this
kernel's loads and stores ask for; caches may serve some of it. Lists of the host (block tables,
tiles) are left out: some bytes a column. The interpreter's counts are held against ``moved`` by a
test, and GPU measurements against the predictions made from both.

Knows nothing of triton or of time. Called by ``benchmarks.kernel_predictions``.
"""

from collections.abc import Iterable
from dataclasses import dataclass

Spans = Iterable[tuple[int, int]]
"""(start, end) of each sequence's rows."""


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's attention, and how its KV is stored."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int = 2
    """Of queries and answers."""
    kv_bytes: int = 2
    """Of an element of KV."""
    scale_bytes: int = 0
    """Of K's or V's scale, a token and head: 2 where KV is quantised."""

    @property
    def row_bytes(self) -> int:
        """Of one row's queries, or of its answer."""
        return self.num_heads * self.head_dim * self.element_bytes

    @property
    def kv_head_bytes(self) -> int:
        """Of one token's K and V, of one KV head."""
        return 2 * (self.head_dim * self.kv_bytes + self.scale_bytes)

    @property
    def token_bytes(self) -> int:
        """Of one token's K and V."""
        return self.num_kv_heads * self.kv_head_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one launch (decode: of both)."""

    needed: int
    """Bytes."""
    moved: int
    """Bytes."""
    flops: int


def prefill_attention(spans: Spans, heads: Heads, tokens_per_tile: int) -> Traffic:
    """Every tile reads its context again: what a cache does not serve is the price of tiles."""
    rows = needed_columns = moved_columns = seen = 0
    for start, end in spans:
        rows += end - start
        needed_columns += end
        moved_columns += sum(
            min(first + tokens_per_tile, end) for first in range(start, end, tokens_per_tile)
        )
        seen += sum(range(start + 1, end + 1))
    both_ends = 2 * rows * heads.row_bytes
    return Traffic(
        both_ends + needed_columns * heads.token_bytes,
        both_ends + moved_columns * heads.token_bytes,
        4 * heads.head_dim * heads.num_heads * seen,
    )


def decode_attention(
    contexts: Iterable[int], heads: Heads, num_splits: int, used_splits: Iterable[int]
) -> Traffic:
    """``used_splits``: how many of the splits each context fills; K and V are read once."""
    contexts = list(contexts)
    both_ends = 2 * len(contexts) * heads.row_bytes
    columns = sum(contexts)
    needed = both_ends + columns * heads.token_bytes
    # A partial answer in float32 is written and read; its logarithm also where it is empty.
    partials = 8 * heads.num_heads * heads.head_dim * sum(used_splits)
    logs = 8 * heads.num_heads * num_splits * len(contexts)
    # The tile of queries is loaded by every split.
    queries = (num_splits - 1) * len(contexts) * heads.row_bytes
    extra = partials + logs + queries if num_splits > 1 else 0
    return Traffic(needed, needed + extra, 4 * heads.head_dim * heads.num_heads * columns)


def rotate_and_store(rows: int, heads: Heads) -> Traffic:
    """Reads q, k, v and the angles; writes q, and k and v as they are stored."""
    kv_read = 2 * heads.num_kv_heads * heads.head_dim * heads.element_bytes
    angles = 4 * heads.head_dim
    once = 2 * heads.row_bytes + kv_read + heads.token_bytes
    total_heads = heads.num_heads + 2 * heads.num_kv_heads
    # Each program, of four heads, reads the row's angles; the first needs them.
    programs = -(-total_heads // 4)
    flops = 3 * heads.head_dim * (heads.num_heads + heads.num_kv_heads)
    return Traffic(rows * (once + angles), rows * (once + programs * angles), rows * flops)


def rms_norm(rows: int, columns: int, element_bytes: int, has_residual: bool) -> Traffic:
    """Reads x (and the residual), writes the norm (and the sum); every row reads the weight."""
    tensors = 4 if has_residual else 2
    weight = columns * element_bytes
    each = tensors * rows * columns * element_bytes
    return Traffic(each + weight, each + rows * weight, 4 * rows * columns)


def gated_activation(rows: int, columns: int, element_bytes: int) -> Traffic:
    """Reads gate and up, writes their product; ``columns`` of the result."""
    total = 3 * rows * columns * element_bytes
    return Traffic(total, total, 6 * rows * columns)


def copy_blocks(pairs: int, region_bytes: int) -> Traffic:
    """Reads and writes each region."""
    return Traffic(2 * pairs * region_bytes, 2 * pairs * region_bytes, 0)


def move_tokens(tokens: int, source: Heads, target: Heads) -> Traffic:
    """Blocks to wire form or back."""
    total = tokens * (source.token_bytes + target.token_bytes)
    return Traffic(total, total, 2 * tokens * source.num_kv_heads * source.head_dim)
