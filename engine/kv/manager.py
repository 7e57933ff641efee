"""Which sequence holds which blocks: allocation, growth, forks, publication, quarantine.

Joins the pool and the prefix index. Knows tokens, not requests, steps or tensors.
Called by ``scheduler``; the services read its stats. Single-threaded: the caller holds a lock.

A block enters the prefix index only when its bytes exist: whoever wrote or received them says
so with ``publish``. Blocks below ``num_cached_tokens`` of an allocation are shared and full,
and never written by the sequence; those after are its own until it publishes them.

Forks share all blocks, also the last, half full one. Who would write to a block that others
hold gets a fresh one instead, and a copy to be made before anything is written (``copies``);
the block it is copied from stays held until it has been made (``copied``).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from engine.errors import IllegalTransition, IntegrityError, InvalidConfig
from engine.kv.journal import CacheNews
from engine.kv.pool import BlockPool, BlockStats
from engine.kv.prefix import PrefixIndex, block_hashes, check_block_size, root_hash


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks for all tokens of a sequence; the KV of the first ones is already there."""

    block_table: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """All layers of one block, to be copied into another."""

    from_block: int
    to_block: int


@dataclass(slots=True)
class _Holding:
    """What one sequence holds. ``hashes`` are those of its first full blocks, as far as known."""

    root: bytes
    block_ids: list[int]
    num_tokens: int
    """What the blocks are for; fills the last of them at least by one token."""
    hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    num_forked_blocks: int = 0
    """The first so many blocks may be shared with forks, published or not."""


class KvManager:
    """The KV blocks of one engine, by sequence.

    Args:
        num_blocks: blocks in the KV cache.
        block_size: tokens in a block, a multiple of 16.
        model_digest: weights and recipe; part of every block hash.
        prefix_cache: reuse the KV of equal beginnings.
        watermark_blocks: an allocation leaves this many blocks for the growth of the
            sequences that hold blocks already; without any it may take all.

    Raises:
        InvalidConfig: a size is impossible.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        model_digest: str,
        prefix_cache: bool = True,
        watermark_blocks: int = 0,
    ) -> None:
        check_block_size(block_size)
        if num_blocks < 1:
            raise InvalidConfig("the KV cache holds no block: raise kv_cache_bytes")
        self.block_size = block_size
        self.num_query_tokens = 0
        """Tokens looked up in the prefix index by successful allocations, ever."""
        self.num_hit_tokens = 0
        """Of those, tokens found."""
        self._model_digest = model_digest
        self._prefix_cache = prefix_cache
        self._watermark_blocks = watermark_blocks
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex()
        self._holdings: dict[str, _Holding] = {}
        self._copies: list[tuple[str, BlockCopy]] = []  # not yet made, in order, by writer

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence the whole cache could hold."""
        return self._pool.num_blocks * self.block_size

    @property
    def sequence_ids(self) -> Collection[str]:
        """Who holds blocks."""
        return self._holdings.keys()

    def hashes(self, token_ids: Sequence[int], salt: str = "") -> list[bytes]:
        """Block hashes of the full blocks of ``token_ids``."""
        return block_hashes(root_hash(self._model_digest, salt=salt), token_ids, self.block_size)

    def block_table(self, sequence_id: str) -> tuple[int, ...]:
        return tuple(self._holding(sequence_id).block_ids)

    def allocate(
        self,
        sequence_id: str,
        token_ids: Sequence[int],
        salt: str = "",
        num_forks: int = 1,
        takes_over: bool = True,
    ) -> Allocation | None:
        """Blocks for all of ``token_ids``, or None when they do not fit now.

        Takes over the longest published beginning, but never all of it: at least the last
        token is left to compute, because its logits are needed.

        Args:
            num_forks: how many the sequence will become; each but one will want a block to
                go on in, so that many must be left over.
            takes_over: False where every token has to be computed: nothing is looked up.
        """
        if sequence_id in self._holdings:
            raise IllegalTransition(f"sequence {sequence_id}: allocated twice")
        holding = _Holding(root_hash(self._model_digest, salt=salt), [], len(token_ids))
        hits: list[int] = []
        if self._prefix_cache:
            self._extend_hashes(holding, token_ids, len(token_ids) // self.block_size)
            if takes_over:
                hits = self._index.longest_prefix(
                    holding.hashes[: (len(token_ids) - 1) // self.block_size]
                )
        num_fresh = self._num_blocks_for(len(token_ids)) - len(hits)
        if not self._fits(hits, num_fresh + num_forks - 1):
            return None
        for block_id in hits:
            self._pool.share(block_id)
        holding.block_ids = hits + self._take(num_fresh)
        holding.num_published_blocks = len(hits)
        self._holdings[sequence_id] = holding
        num_cached_tokens = len(hits) * self.block_size
        self.num_query_tokens += len(token_ids) if takes_over else 0
        self.num_hit_tokens += num_cached_tokens
        return Allocation(tuple(holding.block_ids), num_cached_tokens)

    def append(self, sequence_id: str, num_tokens: int) -> bool:
        """Grow to hold ``num_tokens`` in all; the new ones may then be written.

        A block that they share with another's tokens is replaced by a copy to be made. False:
        does not fit, and nothing changed.
        """
        holding = self._holding(sequence_id)
        if num_tokens <= holding.num_tokens:
            return True
        num_fresh = self._num_blocks_for(num_tokens) - len(holding.block_ids)
        i = holding.num_tokens // self.block_size
        unshares = i < len(holding.block_ids) and self._num_holders(holding.block_ids[i]) > 1
        if num_fresh + unshares > self._pool.num_available:
            return False
        if unshares:
            self._unshare(sequence_id, i)
        holding.block_ids += self._take(num_fresh)
        holding.num_forked_blocks = min(holding.num_forked_blocks, i)
        holding.num_tokens = num_tokens
        return True

    def fork(self, sequence_id: str, fork_id: str) -> None:
        """Let ``fork_id`` hold all blocks of ``sequence_id``, too. Takes no block.

        The KV of all their tokens exists. Both go on with ``append``.
        """
        if fork_id in self._holdings:
            raise IllegalTransition(f"sequence {fork_id}: allocated twice")
        if any(writer == sequence_id for writer, _ in self._copies):
            raise IllegalTransition(f"sequence {sequence_id}: forked before its copy is made")
        holding = self._holding(sequence_id)
        for block_id in holding.block_ids:
            self._pool.share(block_id)
        holding.num_forked_blocks = len(holding.block_ids)
        self._holdings[fork_id] = replace(
            holding, block_ids=list(holding.block_ids), hashes=list(holding.hashes)
        )

    def copies(self) -> tuple[BlockCopy, ...]:
        """What must be copied, in this order, before the next step writes."""
        return tuple(copy for _, copy in self._copies)

    def copied(self) -> None:
        """All ``copies`` have been made."""
        for _, copy in self._copies:
            self._pool.release(copy.from_block)
        self._copies.clear()

    def publish(self, sequence_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """The KV of the first ``num_computed_tokens`` of ``token_ids`` exists: index full blocks.

        Idempotent. A block whose hash another block has already stays unindexed.
        """
        holding = self._holding(sequence_id)
        num_full = num_computed_tokens // self.block_size
        if num_computed_tokens > len(token_ids) or num_full > len(holding.block_ids):
            raise IllegalTransition(f"sequence {sequence_id}: publishes more than it holds")
        if not self._prefix_cache or num_full <= holding.num_published_blocks:
            return
        self._extend_hashes(holding, token_ids, num_full)
        for i in range(holding.num_published_blocks, num_full):
            if holding.block_ids[i] in self._index:
                continue  # a fork that shares the block has published it
            if self._index.add(holding.hashes[i], holding.block_ids[i]):
                self._pool.mark_indexed(holding.block_ids[i])
        holding.num_published_blocks = num_full

    def free(self, sequence_id: str) -> None:
        """Give all blocks back; published ones stay cached.

        The last block goes first, so that a chain is evicted from its end.
        """
        holding = self._pop(sequence_id)
        for block_id in reversed(holding.block_ids):
            self._pool.release(block_id)

    def quarantine(self, sequence_id: str) -> tuple[int, ...]:
        """End a sequence that a remote writer may still be writing.

        Its unpublished blocks are locked away and returned: whoever proves the writer quiet
        hands exactly these to ``release_quarantine``. Nobody writes published ones: they are
        given back.
        """
        holding = self._pop(sequence_id)
        published = holding.block_ids[: holding.num_published_blocks]
        written = holding.block_ids[holding.num_published_blocks :]
        for block_id in written:
            self._pool.quarantine(block_id)
        for block_id in reversed(published):
            self._pool.release(block_id)
        return tuple(written)

    def release_quarantine(self, block_ids: Iterable[int]) -> None:
        """The remote writer of these blocks is quiet: they are free."""
        for block_id in block_ids:
            self._pool.release_quarantine(block_id)

    def stats(self) -> BlockStats:
        return self._pool.stats()

    def fragmentation_ratio(self) -> float:
        """Share of the held slots that no token is for: 0 to 1."""
        unused: dict[int, int] = {}
        for holding in self._holdings.values():
            last = holding.block_ids[-1]
            room = len(holding.block_ids) * self.block_size - holding.num_tokens
            unused[last] = min(room, unused.get(last, room))
        num_slots = self.stats().held * self.block_size
        return sum(unused.values()) / num_slots if num_slots else 0.0

    def published(self) -> dict[bytes, int]:
        """The block of every hash in the prefix index."""
        return self._index.blocks()

    def news(self, sequence: int) -> CacheNews:
        """What entered and left the prefix index from ``sequence`` on; see ``CacheJournal``."""
        return self._index.journal.since(sequence)

    def check_integrity(self) -> None:
        """Pool, index and block tables agree.

        Raises:
            IntegrityError: they do not.
        """
        self._pool.check_integrity()
        self._index.check_integrity()
        counts = [0] * self._pool.num_blocks
        for sequence_id, holding in self._holdings.items():
            if len(set(holding.block_ids)) != len(holding.block_ids):
                raise IntegrityError(f"sequence {sequence_id}: one block twice in its table")
            for i, block_id in enumerate(holding.block_ids):
                counts[block_id] += 1
                num_shared = max(holding.num_published_blocks, holding.num_forked_blocks)
                if i >= num_shared and self._num_holders(block_id) != 1:
                    raise IntegrityError(f"block {block_id}: unpublished, but owned twice")
            if self._num_blocks_for(holding.num_tokens) != len(holding.block_ids):
                raise IntegrityError(f"sequence {sequence_id}: tokens and blocks disagree")
        for writer, copy in self._copies:
            counts[copy.from_block] += 1
            if copy.to_block not in self._holding(writer).block_ids:
                raise IntegrityError(f"block {copy.to_block}: copied to, but not held")
        if any(self._pool.ref_count(i) != count for i, count in enumerate(counts)):
            raise IntegrityError("ref counts differ from the block tables")
        if self.stats().cached > len(self._index):
            raise IntegrityError("more blocks cached than indexed")

    def _num_holders(self, block_id: int) -> int:
        """Sequences that hold it; a copy yet to be made only reads."""
        num_readers = sum(copy.from_block == block_id for _, copy in self._copies)
        return self._pool.ref_count(block_id) - num_readers

    def _unshare(self, sequence_id: str, i: int) -> None:
        """Its reference to the shared block becomes the copy's, until that has been made."""
        block_ids = self._holdings[sequence_id].block_ids
        (fresh,) = self._take(1)
        self._copies.append((sequence_id, BlockCopy(block_ids[i], fresh)))
        block_ids[i] = fresh

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _fits(self, hits: list[int], num_fresh: int) -> bool:
        spared = self._watermark_blocks if self._holdings else 0
        # A hit nobody holds is available now and will not be once it is shared.
        num_cached_hits = sum(self._pool.ref_count(block_id) == 0 for block_id in hits)
        return num_fresh + num_cached_hits + spared <= self._pool.num_available

    def _take(self, count: int) -> list[int]:
        taken = self._pool.take(count)
        if taken is None:
            raise IntegrityError(f"{count} blocks were promised and are not there")
        for block_id in taken:
            self._index.forget(block_id)
        return taken

    def _extend_hashes(
        self, holding: _Holding, token_ids: Sequence[int], num_full_blocks: int
    ) -> None:
        start = len(holding.hashes) * self.block_size
        parent = holding.hashes[-1] if holding.hashes else holding.root
        tail = token_ids[start : num_full_blocks * self.block_size]
        holding.hashes += block_hashes(parent, tail, self.block_size)

    def _holding(self, sequence_id: str) -> _Holding:
        holding = self._holdings.get(sequence_id)
        if holding is None:
            raise IllegalTransition(f"sequence {sequence_id}: holds no blocks")
        return holding

    def _pop(self, sequence_id: str) -> _Holding:
        holding = self._holding(sequence_id)
        del self._holdings[sequence_id]
        for writer, copy in self._copies:
            if writer == sequence_id:
                self._pool.release(copy.from_block)
        self._copies = [(w, copy) for w, copy in self._copies if w != sequence_id]
        return holding
