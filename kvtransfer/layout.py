"""The KV layout: what one block of KV memory looks like, defined once for everybody.

Knows nothing of torch, of instances or of requests. The engine lays its cache out by it;
kvtransfer compares two of them to decide whether regions may travel verbatim.
"""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE_BYTES = {"int8": 2}
"""Of the float16 scale that belongs to each token's key, or value, of each head."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """One tensor a layer, ``[num_blocks, 2, block_size, num_kv_heads, head_dim]``.

    One (layer, block) is one contiguous region: keys, then values; of a dtype in ``SCALE_BYTES``
    then the scales, ``[2, block_size, num_kv_heads]``. A value is its element times its scale.
    """

    dtype: str
    """Element type: a key of ``DTYPE_BYTES``."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens in a block."""
    order: str = "rows"
    """Order inside a region; it belongs to the attention backend."""

    @property
    def region_bytes(self) -> int:
        """Bytes of one (layer, block)."""
        per_head = self.head_dim * DTYPE_BYTES[self.dtype] + SCALE_BYTES.get(self.dtype, 0)
        return 2 * self.block_size * self.num_kv_heads * per_head

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.region_bytes * self.num_layers

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def difference(self, other: "KvLayout") -> str | None:
        """The first field in which two layouts differ, as ``field: ours != theirs``; else None."""
        for field in self.__slots__:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return f"{field}: {ours} != {theirs}"
        return None
