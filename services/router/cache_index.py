"""Which instance has which beginnings of prompts in its prefix cache, as far as it was told.

Fed by the news that instances send with their heartbeats; a little behind, so only to place by.
Its size is bounded by that of the caches, and by ``MAX_KEYS`` for each. Pure. Owned by ``fleet``,
asked before a request is placed.
"""

from collections.abc import Iterable, Mapping, Sequence

from engine.kv.journal import KEY_BYTES, CacheNews

MAX_KEYS = 1 << 20
"""Of one instance; what is beyond is not noted."""


class CacheIndex:
    """Cached blocks by instance."""

    def __init__(self) -> None:
        self._keys: dict[str, set[bytes]] = {}
        self._next: dict[str, int] = {}

    def apply(self, instance_id: str, news: CacheNews) -> int:
        """Take news in. Returns what to ask for next."""
        keys = self._keys.setdefault(instance_id, set())
        if news.is_whole:
            keys.clear()
        keys.difference_update(news.removed)
        keys.update(news.stored[: MAX_KEYS - len(keys)])
        self._next[instance_id] = news.next_sequence
        return news.next_sequence

    def next_sequence(self, instance_id: str) -> int:
        """What to ask for next; 0: everything."""
        return self._next.get(instance_id, 0)

    def forget(self, instance_id: str) -> None:
        """It has left."""
        self._keys.pop(instance_id, None)
        self._next.pop(instance_id, None)

    def num_cached_blocks(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        """How many of the first of ``hashes`` each instance has, without a gap, if any."""
        keys = [block_hash[:KEY_BYTES] for block_hash in hashes]
        counts = {i: _length(keys, known) for i, known in self._keys.items()}
        return {instance_id: count for instance_id, count in counts.items() if count}


def _length(keys: Iterable[bytes], known: set[bytes]) -> int:
    count = 0
    for key in keys:
        if key not in known:
            break
        count += 1
    return count
