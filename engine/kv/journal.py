"""What entered and left a prefix cache, for whoever places requests by it.

A bounded log of block hashes, numbered from the start of the process. A reader says how far it
has read; one that fell behind gets everything that is there now instead. Knows nothing of blocks
or of who reads. Written by ``prefix``, read by whoever tells the router.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

KEY_BYTES = 8
"""Of a block hash, enough to place by: where two collide a request is placed a little worse."""


@dataclass(frozen=True, slots=True)
class CacheNews:
    """The difference between what a reader knew and what is there.

    Keys are the first ``KEY_BYTES`` of block hashes.
    """

    next_sequence: int
    """Where to go on reading."""
    is_whole: bool
    """``stored`` is all there is: forget what you knew."""
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class CacheJournal:
    """The log of one prefix index.

    Args:
        everything: the hashes in the index now, oldest first.
        max_events: how many are kept.
        max_news: how many are told at once; of a whole cache, the newest.
    """

    def __init__(
        self,
        everything: Callable[[], Iterable[bytes]],
        max_events: int = 1 << 16,
        max_news: int = 1 << 15,
    ) -> None:
        self._everything = everything
        self._events: deque[tuple[bytes, bool]] = deque(maxlen=max_events)
        self._max_news = max_news
        self.next_sequence = 1

    def stored(self, block_hash: bytes) -> None:
        """It is in the index now."""
        self._note(block_hash, True)

    def removed(self, block_hash: bytes) -> None:
        """It is not any more."""
        self._note(block_hash, False)

    def since(self, sequence: int) -> CacheNews:
        """What a reader that wants ``sequence`` next has missed; 0: it knows nothing."""
        first = self.next_sequence - len(self._events)
        if not first <= sequence <= self.next_sequence:
            keys = [block_hash[:KEY_BYTES] for block_hash in self._everything()]
            return CacheNews(self.next_sequence, True, tuple(keys[-self._max_news :]))
        start = sequence - first
        count = min(self._max_news, len(self._events) - start)
        # The last word on each key is the one that counts.
        events = islice(self._events, start, start + count)
        last = {block_hash[:KEY_BYTES]: is_stored for block_hash, is_stored in events}
        return CacheNews(
            sequence + count,
            False,
            tuple(key for key, is_stored in last.items() if is_stored),
            tuple(key for key, is_stored in last.items() if not is_stored),
        )

    def _note(self, block_hash: bytes, is_stored: bool) -> None:
        self._events.append((block_hash, is_stored))
        self.next_sequence += 1
