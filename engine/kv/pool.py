"""Which blocks of KV memory are free, cached, held or quarantined.

Counts references and keeps the free list. Knows nothing of tokens, hashes or sequences.
Called by ``manager`` only.

Every block is in exactly one state, so free + cached + held + quarantined = total:

    free         no content, nobody refers to it
    cached       nobody refers to it, but the prefix index names its content; evictable
    held         one or more sequences refer to it
    quarantined  its sequence is gone, but a remote writer cannot be proven quiet
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import IllegalTransition, IntegrityError


@dataclass(frozen=True, slots=True)
class BlockStats:
    """How many blocks are in each state."""

    total: int
    free: int
    cached: int
    held: int
    quarantined: int


class FreeList:
    """Blocks nobody refers to. Blocks without content go first, then the cached ones, LRU.

    Taking, putting and removing are O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        # A stack, lowest id on top: a fresh sequence gets consecutive blocks, and memory that
        # was just in use is used again first.
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def take(self) -> int:
        """The next block; a cached one is evicted by this."""
        if self._empty:
            return self._empty.pop()
        return self._cached.popitem(last=False)[0]

    def put(self, block_id: int, cached: bool) -> None:
        """Add a block; a cached one becomes the most recently used."""
        if cached:
            self._cached[block_id] = None
        else:
            self._empty.append(block_id)

    def remove_cached(self, block_id: int) -> None:
        """A cached block is referred to again."""
        del self._cached[block_id]

    def empty_ids(self) -> Iterable[int]:
        return tuple(self._empty)

    def cached_ids(self) -> Iterable[int]:
        """Least recently used first."""
        return tuple(self._cached)


class BlockPool:
    """All blocks of one engine. "Does not fit" is None, a bug raises IllegalTransition."""

    def __init__(self, num_blocks: int) -> None:
        self._free_list = FreeList(num_blocks)
        self._ref_counts = [0] * num_blocks
        self._indexed = [False] * num_blocks
        self._quarantined: set[int] = set()

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_available(self) -> int:
        """Blocks that ``take`` could hand out: free and cached."""
        return len(self._free_list)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None when there are not that many.

        Their old content is gone: the caller drops them from its index.
        """
        if count > self.num_available:
            return None
        taken = [self._free_list.take() for _ in range(count)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
            self._indexed[block_id] = False
        return taken

    def share(self, block_id: int) -> None:
        """One more reference to a held or cached block."""
        if self._ref_counts[block_id] == 0:
            if not self._indexed[block_id]:
                raise IllegalTransition(f"block {block_id}: shared, but it has no content")
            self._free_list.remove_cached(block_id)
        self._ref_counts[block_id] += 1

    def mark_indexed(self, block_id: int) -> None:
        """The prefix index names this block: it stays cached when its last reference goes."""
        self._require_held(block_id, "indexed")
        self._indexed[block_id] = True

    def release(self, block_id: int) -> None:
        """One reference less; the last one makes the block cached or free."""
        self._require_held(block_id, "released")
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            self._free_list.put(block_id, cached=self._indexed[block_id])

    def quarantine(self, block_id: int) -> None:
        """Lock away a block with one reference that a remote writer may still write."""
        if self._ref_counts[block_id] != 1 or self._indexed[block_id]:
            raise IllegalTransition(f"block {block_id}: quarantined, but others may read it")
        self._ref_counts[block_id] = 0
        self._quarantined.add(block_id)

    def release_quarantine(self, block_id: int) -> None:
        """The remote writer is proven quiet: the block is free."""
        if block_id not in self._quarantined:
            raise IllegalTransition(f"block {block_id}: is not quarantined")
        self._quarantined.remove(block_id)
        self._free_list.put(block_id, cached=False)

    def stats(self) -> BlockStats:
        cached = self._free_list.num_cached
        free = len(self._free_list) - cached
        quarantined = len(self._quarantined)
        held = self.num_blocks - free - cached - quarantined
        return BlockStats(self.num_blocks, free, cached, held, quarantined)

    def check_integrity(self) -> None:
        """Every block is in exactly one state.

        Raises:
            IntegrityError: a block is lost, or in two places.
        """
        empty, cached = list(self._free_list.empty_ids()), list(self._free_list.cached_ids())
        held = [block_id for block_id, count in enumerate(self._ref_counts) if count > 0]
        seen = sorted([*empty, *cached, *held, *self._quarantined])
        if seen != list(range(self.num_blocks)):
            raise IntegrityError(f"blocks lost or in two states: {len(seen)} of {self.num_blocks}")
        if any(self._indexed[block_id] for block_id in (*empty, *self._quarantined)):
            raise IntegrityError("a free or quarantined block is marked as indexed")
        if not all(self._indexed[block_id] for block_id in cached):
            raise IntegrityError("a cached block is not indexed")
        if self.stats().held != len(held):
            raise IntegrityError("free + cached + held + quarantined != total")

    def _require_held(self, block_id: int, verb: str) -> None:
        if self._ref_counts[block_id] == 0:
            raise IllegalTransition(f"block {block_id}: {verb}, but nobody holds it")
