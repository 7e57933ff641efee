"""The block pool: states, references, and the order in which blocks are given out."""

import pytest

from engine.errors import IllegalTransition, IntegrityError
from engine.kv.pool import BlockPool, BlockStats


def take(pool: BlockPool, count: int) -> list[int]:
    taken = pool.take(count)
    assert taken is not None
    return taken


def cached_block(pool: BlockPool) -> int:
    (block_id,) = take(pool, 1)
    pool.mark_indexed(block_id)
    pool.release(block_id)
    return block_id


def test_a_new_pool_is_free_and_gives_consecutive_blocks() -> None:
    pool = BlockPool(5)
    assert pool.stats() == BlockStats(total=5, free=5, cached=0, held=0, quarantined=0)
    assert take(pool, 3) == [0, 1, 2]
    assert pool.stats() == BlockStats(total=5, free=2, cached=0, held=3, quarantined=0)


def test_what_does_not_fit_is_none_and_changes_nothing() -> None:
    pool = BlockPool(2)
    assert pool.take(3) is None
    assert pool.stats().free == 2
    assert len(take(pool, 2)) == 2
    assert pool.take(1) is None
    assert pool.take(0) == []


def test_blocks_without_content_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    kept = cached_block(pool)
    assert kept not in take(pool, 2)
    assert take(pool, 1) == [kept]


def test_the_least_recently_used_cached_block_is_evicted_first() -> None:
    pool = BlockPool(3)
    first, second, third = take(pool, 3)
    for block_id in (first, second, third):
        pool.mark_indexed(block_id)
        pool.release(block_id)
    pool.share(first)
    pool.release(first)
    assert take(pool, 3) == [second, third, first]


def test_an_evicted_block_has_lost_its_content() -> None:
    pool = BlockPool(1)
    cached_block(pool)
    (block_id,) = take(pool, 1)
    pool.release(block_id)
    assert pool.stats().cached == 0
    with pytest.raises(IllegalTransition, match="has no content"):
        pool.share(block_id)


def test_the_last_reference_decides() -> None:
    pool = BlockPool(2)
    shared, lone = take(pool, 2)
    pool.mark_indexed(shared)
    pool.share(shared)
    pool.release(shared)
    pool.release(lone)
    assert pool.stats() == BlockStats(total=2, free=1, cached=0, held=1, quarantined=0)
    pool.release(shared)
    assert pool.stats() == BlockStats(total=2, free=1, cached=1, held=0, quarantined=0)


def test_a_quarantined_block_is_nobodys_until_it_is_released() -> None:
    pool = BlockPool(1)
    (block_id,) = take(pool, 1)
    pool.quarantine(block_id)
    assert pool.stats() == BlockStats(total=1, free=0, cached=0, held=0, quarantined=1)
    assert pool.take(1) is None
    pool.check_integrity()
    pool.release_quarantine(block_id)
    assert take(pool, 1) == [block_id]


@pytest.mark.parametrize("verb", ["release", "mark_indexed", "quarantine", "release_quarantine"])
def test_nothing_but_taking_is_allowed_on_a_free_block(verb: str) -> None:
    pool = BlockPool(1)
    with pytest.raises(IllegalTransition):
        getattr(pool, verb)(0)
    pool.check_integrity()
    assert pool.stats().free == 1


def test_a_block_that_others_may_read_is_never_quarantined() -> None:
    pool = BlockPool(2)
    indexed, shared = take(pool, 2)
    pool.mark_indexed(indexed)
    pool.share(shared)
    for block_id in (indexed, shared):
        with pytest.raises(IllegalTransition, match="others may read"):
            pool.quarantine(block_id)


def test_a_lost_block_is_found() -> None:
    pool = BlockPool(2)
    (block_id,) = take(pool, 1)
    pool._ref_counts[block_id] = 0
    with pytest.raises(IntegrityError, match="lost"):
        pool.check_integrity()


def test_a_block_in_two_states_is_found() -> None:
    pool = BlockPool(2)
    pool._ref_counts[0] = 1
    with pytest.raises(IntegrityError, match="two states"):
        pool.check_integrity()
