"""Who holds which blocks, what is found again, and what may be published when."""

import pytest

from engine.errors import IllegalTransition, InvalidConfig
from engine.kv.manager import Allocation, KvManager
from engine.kv.pool import BlockStats

BLOCK = 16


def manager(num_blocks: int = 8, **options: object) -> KvManager:
    return KvManager(num_blocks, BLOCK, "m", **options)  # type: ignore[arg-type]


def tokens(num_tokens: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + num_tokens))


def allocate(
    kv: KvManager, sequence_id: str, token_ids: tuple[int, ...], salt: str = ""
) -> Allocation:
    allocation = kv.allocate(sequence_id, token_ids, salt)
    assert allocation is not None
    kv.check_integrity()
    return allocation


def cache(kv: KvManager, token_ids: tuple[int, ...], salt: str = "") -> tuple[int, ...]:
    """Compute a sequence and let it go; returns the table it had."""
    table = allocate(kv, "earlier", token_ids, salt).block_table
    kv.publish("earlier", token_ids, len(token_ids))
    kv.free("earlier")
    kv.check_integrity()
    return table


# (prompt length in blocks and tokens, blocks of it cached before, blocks that may be reused)
HITS = [
    (k * BLOCK + extra, held, min(held, (k * BLOCK + extra - 1) // BLOCK))
    for k in (1, 2, 4)
    for extra in (-1, 0, 1)
    for held in range(k + 1)
]


@pytest.mark.parametrize(("num_tokens", "held", "expected"), HITS)
def test_hits_at_every_edge_of_a_block(num_tokens: int, held: int, expected: int) -> None:
    kv = manager()
    earlier = cache(kv, tokens(held * BLOCK)) if held else ()
    allocation = allocate(kv, "s", tokens(num_tokens))
    assert allocation.num_cached_tokens == expected * BLOCK
    assert allocation.block_table[:expected] == earlier[:expected]
    assert len(allocation.block_table) == -(-num_tokens // BLOCK)
    assert len(set(allocation.block_table)) == len(allocation.block_table)
    query = num_tokens + held * BLOCK
    assert (kv.num_query_tokens, kv.num_hit_tokens) == (query, expected * BLOCK)
    kv.publish("s", tokens(num_tokens), num_tokens)
    kv.check_integrity()
    kv.free("s")
    kv.check_integrity()
    assert kv.stats().held == 0


def test_a_salt_separates_and_the_same_salt_shares() -> None:
    kv = manager()
    cache(kv, tokens(32), salt="a")
    assert allocate(kv, "plain", tokens(33)).num_cached_tokens == 0
    assert allocate(kv, "b", tokens(33), salt="b").num_cached_tokens == 0
    kv.free("plain")
    kv.free("b")
    assert allocate(kv, "a", tokens(33), salt="a").num_cached_tokens == 32


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    kv = manager(prefix_cache=False)
    cache(kv, tokens(32))
    assert kv.stats().free == 8
    assert allocate(kv, "s", tokens(33)).num_cached_tokens == 0


def test_blocks_are_found_only_once_they_are_published() -> None:
    kv = manager()
    allocate(kv, "landing", tokens(33))
    assert allocate(kv, "other", tokens(33)).num_cached_tokens == 0
    kv.free("other")
    kv.publish("landing", tokens(33), 20)
    assert allocate(kv, "other", tokens(33)).num_cached_tokens == 16
    kv.free("other")
    kv.publish("landing", tokens(33), 33)
    kv.publish("landing", tokens(33), 33)
    assert allocate(kv, "other", tokens(33)).num_cached_tokens == 32
    assert kv.block_table("other")[:2] == kv.block_table("landing")[:2]
    kv.check_integrity()


def test_unpublished_blocks_are_simply_free_again() -> None:
    kv = manager()
    allocate(kv, "landing", tokens(64))
    kv.free("landing")
    assert kv.stats() == BlockStats(total=8, free=8, cached=0, held=0, quarantined=0)


def test_decoded_blocks_are_found_too() -> None:
    kv = manager()
    allocate(kv, "s", tokens(20))
    assert kv.append("s", 40)
    kv.publish("s", tokens(40), 32)
    kv.free("s")
    assert allocate(kv, "t", tokens(40)).num_cached_tokens == 32


def test_the_second_block_of_one_hash_stays_unindexed() -> None:
    kv = manager()
    allocate(kv, "first", tokens(17))
    allocate(kv, "second", tokens(17))
    kv.publish("first", tokens(17), 17)
    kv.publish("second", tokens(17), 17)
    kv.check_integrity()
    kept = kv.block_table("first")[0]
    kv.free("first")
    kv.free("second")
    assert kv.stats().cached == 1
    assert allocate(kv, "third", tokens(17)).block_table[0] == kept


def test_a_chain_is_evicted_from_its_end() -> None:
    kv = manager(4)
    cache(kv, tokens(64))
    allocate(kv, "other", tokens(32, first=500))
    kv.free("other")
    assert allocate(kv, "s", tokens(64)).num_cached_tokens == 32


def test_a_hit_is_never_evicted_by_its_own_allocation() -> None:
    kv = manager(4)
    earlier = cache(kv, tokens(32))
    allocation = allocate(kv, "s", tokens(64))
    assert allocation.block_table[:2] == earlier[:2]


def test_a_hit_is_not_counted_as_room() -> None:
    kv = manager(4)
    cache(kv, tokens(32))
    allocate(kv, "other", tokens(32, first=500))
    assert kv.allocate("s", tokens(48)) is None
    assert kv.allocate("s", tokens(33)) is None
    assert allocate(kv, "s", tokens(32)).num_cached_tokens == 16


def test_what_does_not_fit_changes_nothing() -> None:
    kv = manager(4)
    allocate(kv, "s", tokens(40))
    before = kv.stats()
    assert kv.allocate("t", tokens(17)) is None
    assert not kv.append("s", 65)
    assert kv.stats() == before
    assert len(kv.block_table("s")) == 3
    assert kv.append("s", 64)
    assert kv.append("s", 10)
    assert len(kv.block_table("s")) == 4


def test_the_watermark_is_for_growth_and_does_not_bind_the_first() -> None:
    kv = manager(4, watermark_blocks=2)
    allocate(kv, "lone", tokens(64))
    kv.free("lone")
    allocate(kv, "s", tokens(16))
    assert kv.allocate("t", tokens(32)) is None
    allocate(kv, "t", tokens(16))
    assert kv.append("s", 48)


def test_quarantine_locks_away_only_what_may_be_written() -> None:
    kv = manager()
    earlier = cache(kv, tokens(32))
    table = allocate(kv, "landing", tokens(60)).block_table
    locked = kv.quarantine("landing")
    assert table[:2] == earlier and locked == table[2:]
    assert kv.stats() == BlockStats(total=8, free=4, cached=2, held=0, quarantined=2)
    kv.check_integrity()
    assert kv.allocate("big", tokens(7 * BLOCK, first=500)) is None
    kv.release_quarantine(locked)
    with pytest.raises(IllegalTransition, match="not quarantined"):
        kv.release_quarantine(locked)
    assert len(allocate(kv, "big", tokens(8 * BLOCK, first=500)).block_table) == 8


def test_an_id_may_come_back_while_its_old_blocks_are_quarantined() -> None:
    kv = manager()
    allocate(kv, "s", tokens(32))
    locked = kv.quarantine("s")
    table = allocate(kv, "s", tokens(32)).block_table
    assert not set(table) & set(locked)
    again = kv.quarantine("s")
    kv.release_quarantine(locked)
    assert kv.stats().quarantined == len(again)


def test_bugs_are_told() -> None:
    kv = manager()
    allocate(kv, "s", tokens(20))
    with pytest.raises(IllegalTransition, match="allocated twice"):
        kv.allocate("s", tokens(20))
    with pytest.raises(IllegalTransition, match="more than it holds"):
        kv.publish("s", tokens(64), 64)
    with pytest.raises(IllegalTransition, match="more than it holds"):
        kv.publish("s", tokens(20), 21)
    kv.free("s")
    for call in (kv.free, kv.block_table, kv.quarantine):
        with pytest.raises(IllegalTransition, match="holds no blocks"):
            call("s")
    with pytest.raises(InvalidConfig, match="kv_cache_bytes"):
        manager(0)


def test_hashes_are_those_of_the_full_blocks() -> None:
    kv = manager()
    assert len(kv.hashes(tokens(33))) == 2
    assert kv.hashes(tokens(33))[:1] == kv.hashes(tokens(16))
    assert kv.hashes(tokens(16)) != kv.hashes(tokens(16), salt="a")


# ---- forks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33])
def test_forks_share_until_they_write(num_tokens: int) -> None:
    kv = manager()
    table = allocate(kv, "a", tokens(num_tokens)).block_table
    kv.publish("a", tokens(num_tokens), num_tokens)
    kv.fork("a", "b")
    kv.fork("a", "c")
    assert kv.block_table("b") == kv.block_table("c") == table
    assert kv.stats().held == len(table)
    for name in "abc":
        assert kv.append(name, num_tokens + 1)
        kv.check_integrity()
    # Full blocks stay shared; of a half full one there are two copies, and the last keeps it.
    is_partial = num_tokens % BLOCK > 0
    num_shared = num_tokens // BLOCK
    assert kv.stats().held == num_shared + 3
    assert [copy.from_block for copy in kv.copies()] == [table[-1]] * 2 * is_partial
    assert [copy.to_block for copy in kv.copies()] == [
        kv.block_table(name)[-1] for name in "ab" if is_partial
    ]
    assert len({kv.block_table(name)[:num_shared] for name in "abc"}) == 1
    kv.copied()
    assert kv.copies() == ()
    for name in "abc":
        kv.free(name)
        kv.check_integrity()
    assert kv.stats().held == 0


def test_the_copied_block_stays_held_until_the_copy_is_made() -> None:
    kv = manager(3)
    (shared,) = allocate(kv, "a", tokens(5)).block_table
    kv.fork("a", "b")
    assert kv.append("a", 6)
    kv.free("b")
    kv.check_integrity()
    assert kv.stats().held == 2
    with pytest.raises(IllegalTransition, match="copy"):
        kv.fork("a", "c")
    kv.copied()
    assert kv.stats().held == 1 and shared not in kv.block_table("a")


def test_a_copy_dies_with_who_wanted_it() -> None:
    kv = manager(3)
    allocate(kv, "a", tokens(5))
    kv.fork("a", "b")
    assert kv.append("a", 6)
    kv.free("a")
    kv.check_integrity()
    assert kv.copies() == () and kv.stats().held == 1
    assert kv.append("b", 6) and kv.copies() == ()


def test_a_fork_that_has_no_block_to_go_on_in_changes_nothing() -> None:
    kv = manager(1)
    allocate(kv, "a", tokens(5))
    kv.fork("a", "b")
    assert not kv.append("b", 6)
    kv.check_integrity()
    kv.free("a")
    assert kv.append("b", 6) and kv.copies() == ()


def test_an_allocation_for_forks_leaves_a_block_for_each() -> None:
    kv = manager(4)
    assert kv.allocate("a", tokens(33), num_forks=3) is None
    assert kv.allocate("a", tokens(33), num_forks=2) is not None


def test_fragmentation_counts_slots_that_no_token_is_for() -> None:
    kv = manager()
    assert kv.fragmentation_ratio() == 0
    allocate(kv, "a", tokens(24))
    assert kv.fragmentation_ratio() == 8 / 32
    kv.fork("a", "b")
    assert kv.fragmentation_ratio() == 8 / 32
    kv.append("b", 25)
    assert kv.fragmentation_ratio() == (8 + 7) / 48
