"""The block memory: where rows go, and that regions are the same bytes."""

import pytest
import torch

from engine.errors import CapacityError, ModelError
from engine.kv.cache import PagedKvCache, key_rows, num_blocks_for
from kvtransfer.layout import KvLayout

LAYOUT = KvLayout("float32", num_layers=2, num_kv_heads=3, head_dim=4, block_size=8)


def test_starts_as_zeros_of_the_documented_shape() -> None:
    cache = PagedKvCache(LAYOUT, 5)
    assert [tuple(layer.shape) for layer in cache.layers] == [(5, 2, 8, 3, 4)] * 2
    assert not any(layer.any() for layer in cache.layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_land_in_their_slots(dtype: str) -> None:
    layout = KvLayout(dtype, 2, 3, 4, block_size=8)
    cache = PagedKvCache(layout, 5)
    slots = torch.tensor([39, 0, 17, 8])
    keys = torch.randn(4, 3, 4).to(getattr(torch, dtype))
    values = torch.randn(4, 3, 4).to(getattr(torch, dtype))
    cache.write(1, key_rows(slots, 8), keys, values)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(cache.layers[1][slot // 8, 0, slot % 8], keys[row])
        assert torch.equal(cache.layers[1][slot // 8, 1, slot % 8], values[row])
    assert not cache.layers[0].any()
    written = (cache.layers[1] != 0).any(-1).any(-1).sum()
    assert written == 2 * len(slots)


def test_a_row_outside_the_cache_is_refused() -> None:
    cache = PagedKvCache(LAYOUT, 5)
    row = torch.zeros(1, 3, 4)
    with pytest.raises(IndexError):
        cache.write(0, key_rows(torch.tensor([40]), 8), row, row)


def test_a_region_is_the_blocks_own_bytes_both_ways() -> None:
    cache = PagedKvCache(LAYOUT, 5)
    cache.layers[1][2] = 1.5
    cache.layers[1][3] = 2.5
    region = cache.region(1, 2, 2)
    assert len(region) == 2 * LAYOUT.region_bytes
    assert bytes(region) == cache.layers[1][2:4].numpy().tobytes()
    region[: LAYOUT.region_bytes] = torch.full((2, 8, 3, 4), 7.0).numpy().tobytes()
    assert (cache.layers[1][2] == 7.0).all()
    assert (cache.layers[1][3] == 2.5).all()
    assert not cache.layers[1][[0, 1, 4]].any()


@pytest.mark.parametrize(("block_id", "count"), [(-1, 1), (5, 1), (4, 2), (0, 0), (0, 6)])
def test_a_region_outside_the_cache_is_refused(block_id: int, count: int) -> None:
    with pytest.raises(IndexError, match="of 5"):
        PagedKvCache(LAYOUT, 5).region(0, block_id, count)


def test_the_memory_outlives_the_cache_while_somebody_holds_a_region() -> None:
    region = PagedKvCache(LAYOUT, 5).region(0, 4)
    region[:] = bytes(range(256)) * (len(region) // 256)
    assert region[255] == 255


def test_num_blocks_for() -> None:
    assert LAYOUT.block_bytes == 2 * 2 * 8 * 3 * 4 * 4
    assert num_blocks_for(LAYOUT.block_bytes * 3 + 1, LAYOUT) == 3
    assert num_blocks_for(LAYOUT.block_bytes - 1, LAYOUT) == 0


def test_what_cannot_be_made_is_said() -> None:
    with pytest.raises(CapacityError, match="raise --kv-cache-bytes"):
        PagedKvCache(LAYOUT, 0)
    with pytest.raises(CapacityError, match="lower --kv-cache-bytes"):
        PagedKvCache(LAYOUT, 1 << 50)
    with pytest.raises(ModelError, match="use --device cpu"):
        PagedKvCache(LAYOUT, 1, "cuda")
