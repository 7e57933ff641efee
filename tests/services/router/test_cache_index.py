"""News of a prefix cache, and the index that lives on them."""

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from engine.kv.journal import KEY_BYTES, CacheJournal
from services.router.cache_index import CacheIndex


def digest(number: int) -> bytes:
    return sha256(bytes([number])).digest()


class Cache:
    """A set of hashes with a journal."""

    def __init__(self, *numbers: int, max_events: int = 100, max_news: int = 1000) -> None:
        self.hashes: dict[bytes, None] = {}
        self.journal = CacheJournal(lambda: self.hashes, max_events, max_news)
        for number in numbers:
            self.turn(number)

    def turn(self, number: int) -> None:
        """In if it was out, else out."""
        block_hash = digest(number)
        if block_hash in self.hashes:
            del self.hashes[block_hash]
            self.journal.removed(block_hash)
        else:
            self.hashes[block_hash] = None
            self.journal.stored(block_hash)


@given(
    st.lists(st.one_of(st.integers(0, 9), st.none()), max_size=60),
    st.integers(1, 12),
    st.integers(10, 15),
)
def test_a_reader_that_has_caught_up_knows_just_what_is_there(
    script: list[int | None], max_events: int, max_news: int
) -> None:
    cache, index = Cache(max_events=max_events, max_news=max_news), CacheIndex()
    for step in script:
        if step is not None:
            cache.turn(step)
        else:
            index.apply("i", cache.journal.since(index.next_sequence("i")))
    while index.next_sequence("i") != cache.journal.next_sequence:
        index.apply("i", cache.journal.since(index.next_sequence("i")))
    for number in range(10):
        known = bool(index.num_cached_blocks([digest(number)]))
        assert known is (digest(number) in cache.hashes)


def test_who_falls_behind_is_told_everything() -> None:
    cache = Cache(0, 1, 2, max_events=3)
    read = cache.journal.since(1)
    assert not read.is_whole and len(read.stored) == 3
    for number in (0, 3, 4):
        cache.turn(number)
    assert not cache.journal.since(read.next_sequence).is_whole
    cache.turn(5)
    whole = cache.journal.since(read.next_sequence)
    assert whole.is_whole
    assert set(whole.stored) == {digest(number)[:KEY_BYTES] for number in (1, 2, 3, 4, 5)}


def test_news_come_in_portions_and_of_too_large_a_cache_the_newest() -> None:
    cache = Cache(*range(10), max_news=4)
    sizes, sequence = [], 1
    while (news := cache.journal.since(sequence)).next_sequence != sequence:
        sizes.append(len(news.stored))
        sequence = news.next_sequence
    assert sizes == [4, 4, 2]
    newest = tuple(digest(number)[:KEY_BYTES] for number in range(6, 10))
    assert cache.journal.since(0).stored == newest


def test_a_gap_ends_a_prefix_and_who_left_has_nothing() -> None:
    index = CacheIndex()
    index.apply("a", Cache(0, 1, 3).journal.since(0))
    index.apply("b", Cache(1, 2).journal.since(0))
    hashes = [digest(number) for number in range(4)]
    assert index.num_cached_blocks(hashes) == {"a": 2}
    assert index.num_cached_blocks(hashes[1:]) == {"a": 1, "b": 2}
    index.forget("a")
    assert index.num_cached_blocks(hashes) == {}
    assert index.next_sequence("a") == 0
