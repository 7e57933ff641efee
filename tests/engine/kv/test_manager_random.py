"""Random operations on the manager, checked after each against a naive model and real content.

The model keeps every block's content (salt and all tokens up to its end), as KV memory would:
a hit must find exactly the content it asks for, a write must never touch what others may read,
and eviction must follow the order of a plain list.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.errors import IllegalTransition
from engine.kv.manager import KvManager

Content = tuple[str, tuple[int, ...]]
"""Salt, and the tokens from the first to the block's last: what its KV depends on."""


# Prompts with common beginnings: three that part after 0, 32 and 48 tokens.
TEMPLATES = [
    tuple(range(100)),
    tuple(range(32)) + tuple(range(500, 568)),
    tuple(range(48)) + tuple(range(700, 752)),
    tuple(range(900, 1000)),
]


class Model:
    """What one sequence holds, told by the test."""

    def __init__(self, token_ids: tuple[int, ...], salt: str, table: list[int], cached: int):
        self.token_ids, self.salt, self.table = token_ids, salt, table
        self.num_computed_tokens = cached
        self.is_forked = False

    def content(self, i: int, block_size: int) -> Content:
        return self.salt, self.token_ids[: (i + 1) * block_size]


class ManagerMachine(RuleBasedStateMachine):
    """Naive on purpose: sets, lists and copies."""

    sequences: Bundle[str] = Bundle("sequences")
    locked: Bundle[tuple[int, ...]] = Bundle("locked")

    @initialize(
        num_blocks=st.sampled_from([9, 6, 12, 3, 1]),
        block_size=st.sampled_from([16, 16, 32]),
        watermark=st.integers(0, 2),
    )
    def build(self, num_blocks: int, block_size: int, watermark: int) -> None:
        self.kv = KvManager(num_blocks, block_size, "m", watermark_blocks=watermark)
        self.num_blocks, self.block_size, self.watermark = num_blocks, block_size, watermark
        self.models: dict[str, Model] = {}
        self.empty = set(range(num_blocks))
        self.cached: list[int] = []  # least recently used first
        self.quarantined: set[int] = set()
        self.memory: dict[int, Content] = {}
        self.index: dict[Content, int] = {}
        self.num_named = 0
        self.pending: list[tuple[str, int, int]] = []  # (writer, from, to), to be copied

    # ---- the model's own accounting --------------------------------------------------------

    def num_holders(self, block_id: int) -> int:
        return sum(model.table.count(block_id) for model in self.models.values())

    def num_readers(self, block_id: int) -> int:
        return sum(from_block == block_id for _, from_block, _ in self.pending)

    def expect_taken(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            if self.empty:
                assert block_id in self.empty, "a cached block was evicted before a free one"
                self.empty.remove(block_id)
            else:
                assert block_id == self.cached.pop(0), "not the least recently used"
            self.memory.pop(block_id, None)
            self.index = {c: b for c, b in self.index.items() if b != block_id}

    def expect_released(self, block_id: int) -> None:
        if self.num_holders(block_id) or self.num_readers(block_id):
            return
        assert block_id not in self.empty and block_id not in self.cached
        if block_id in self.index.values():
            self.cached.append(block_id)
        else:
            self.empty.add(block_id)

    def expected_hits(self, token_ids: tuple[int, ...], salt: str) -> list[int]:
        found = []
        for end in range(self.block_size, len(token_ids), self.block_size):
            block_id = self.index.get((salt, token_ids[:end]))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- operations ------------------------------------------------------------------------

    @rule(
        target=sequences,
        template=st.sampled_from(TEMPLATES),
        num_tokens=st.sampled_from([33, 32, 49, 17, 64, 31, 16, 96, 1, 65]),
        salt=st.sampled_from(["", "", "", "s"]),
    )
    def allocate(self, template: tuple[int, ...], num_tokens: int, salt: str) -> object:
        token_ids = template[:num_tokens]
        sequence_id = f"s{self.num_named}"
        self.num_named += 1
        hits = self.expected_hits(token_ids, salt)
        num_fresh = self.num_for(len(token_ids)) - len(hits)
        available = self.empty | set(self.cached) - set(hits)
        spared = self.watermark if self.models else 0
        allocation = self.kv.allocate(sequence_id, token_ids, salt)
        if num_fresh + spared > len(available):
            assert allocation is None
            return multiple()
        assert allocation is not None
        assert list(allocation.block_table[: len(hits)]) == hits
        assert allocation.num_cached_tokens == len(hits) * self.block_size
        for i, block_id in enumerate(hits):
            assert self.memory[block_id] == (salt, token_ids[: (i + 1) * self.block_size])
            if block_id in self.cached:
                self.cached.remove(block_id)
        self.expect_taken(list(allocation.block_table[len(hits) :]))
        table = list(allocation.block_table)
        self.models[sequence_id] = Model(token_ids, salt, table, allocation.num_cached_tokens)
        return sequence_id

    @rule(sequence_id=sequences, more=st.lists(st.integers(0, 3), min_size=1, max_size=20))
    def append(self, sequence_id: str, more: list[int]) -> None:
        if (model := self.models.get(sequence_id)) is not None:
            self.grow(sequence_id, model, more)

    def grow(self, sequence_id: str, model: Model, more: list[int]) -> None:
        num_tokens = len(model.token_ids) + len(more)
        num_fresh = self.num_for(num_tokens) - len(model.table)
        i, offset = divmod(len(model.token_ids), self.block_size)
        copied = [i] if offset and self.num_holders(model.table[i]) > 1 else []
        fits = num_fresh + len(copied) <= len(self.empty) + len(self.cached)
        assert self.kv.append(sequence_id, num_tokens) == fits
        if fits:
            table = list(self.kv.block_table(sequence_id))
            for i in copied:
                self.expect_taken([table[i]])
                self.pending.append((sequence_id, model.table[i], table[i]))
                model.table[i] = table[i]
            assert table[: len(model.table)] == model.table
            self.expect_taken(table[len(model.table) :])
            model.table = table
            model.token_ids += tuple(more)
        assert [(copy.from_block, copy.to_block) for copy in self.kv.copies()] == [
            (from_block, to_block) for _, from_block, to_block in self.pending
        ]

    @rule(target=sequences, sequence_id=sequences, go_on=st.booleans())
    def fork(self, sequence_id: str, go_on: bool) -> object:
        model = self.models.get(sequence_id)
        if model is None:
            return multiple()
        if model.num_computed_tokens < len(model.token_ids):
            self.compute_and_publish(sequence_id, len(model.token_ids))
        fork_id = f"s{self.num_named}"
        self.num_named += 1
        if any(writer == sequence_id for writer, _, _ in self.pending):
            with pytest.raises(IllegalTransition, match="copy"):
                self.kv.fork(sequence_id, fork_id)
            return multiple()
        self.kv.fork(sequence_id, fork_id)
        model.is_forked = True
        twin = Model(model.token_ids, model.salt, list(model.table), model.num_computed_tokens)
        twin.is_forked = True
        self.models[fork_id] = twin
        self.kv.check_integrity()
        if go_on:
            self.grow(sequence_id, model, [1])
            self.grow(fork_id, twin, [2])
        return fork_id

    @rule()
    def copy(self) -> None:
        self.make_copies()

    def make_copies(self) -> None:
        """The step has begun: content moves, and what it came from may be given away."""
        for _, from_block, to_block in self.pending:
            self.memory[to_block] = self.memory[from_block]
        self.kv.copied()
        while self.pending:
            _, from_block, _ = self.pending.pop(0)
            self.expect_released(from_block)

    def drop_copies(self, writer: str) -> None:
        for copy in [copy for copy in self.pending if copy[0] == writer]:
            self.pending.remove(copy)
            self.expect_released(copy[1])

    @rule(sequence_id=sequences, count=st.sampled_from([100, 100, 16, 1, 33]))
    def compute_and_publish(self, sequence_id: str, count: int) -> None:
        if (model := self.models.get(sequence_id)) is None:
            return
        self.make_copies()
        start = model.num_computed_tokens
        end = min(start + count, len(model.token_ids))
        if start < end and start % self.block_size:
            block_id = model.table[start // self.block_size]
            salt, known = self.memory[block_id]
            # Others may have written on after the place where they parted.
            assert (salt, known[:start]) == (model.salt, model.token_ids[:start])
        for i in range(start // self.block_size, self.num_for(end) if start < end else 0):
            block_id = model.table[i]
            assert self.num_holders(block_id) == 1, "a written block is shared"
            if (i + 1) * self.block_size > start:
                assert block_id not in self.index.values(), "an indexed block is written"
            self.memory[block_id] = model.salt, model.token_ids[:end][: (i + 1) * self.block_size]
        model.num_computed_tokens = end
        self.kv.publish(sequence_id, model.token_ids, end)
        for i in range(start // self.block_size, end // self.block_size):
            if model.table[i] in self.index.values():
                continue
            self.index.setdefault(model.content(i, self.block_size), model.table[i])

    @rule(sequence_id=sequences)
    def publish_again(self, sequence_id: str) -> None:
        if (model := self.models.get(sequence_id)) is not None:
            self.kv.publish(sequence_id, model.token_ids, model.num_computed_tokens)

    @rule(sequence_id=consumes(sequences))
    def free(self, sequence_id: str) -> None:
        model = self.models.pop(sequence_id)
        self.kv.free(sequence_id)
        self.drop_copies(sequence_id)
        for block_id in reversed(model.table):
            self.expect_released(block_id)

    @rule(target=locked, sequence_id=consumes(sequences))
    def quarantine(self, sequence_id: str) -> object:
        model = self.models[sequence_id]
        # Nobody writes from afar to what has been forked, or copied here.
        if model.is_forked or any(writer == sequence_id for writer, _, _ in self.pending):
            self.free(sequence_id)
            return multiple()
        del self.models[sequence_id]
        num_published = model.num_computed_tokens // self.block_size
        written = self.kv.quarantine(sequence_id)
        assert list(written) == model.table[num_published:]
        self.quarantined |= set(written)
        for block_id in reversed(model.table[:num_published]):
            self.expect_released(block_id)
        return written

    @rule(block_ids=consumes(locked))
    def release_quarantine(self, block_ids: tuple[int, ...]) -> None:
        self.kv.release_quarantine(block_ids)
        self.quarantined -= set(block_ids)
        self.empty |= set(block_ids)

    @precondition(lambda self: self.num_named > 0)
    @rule(data=st.data())
    def touch_a_dead_one(self, data: st.DataObject) -> None:
        dead = sorted({f"s{i}" for i in range(self.num_named)} - self.models.keys())
        if dead:
            with pytest.raises(IllegalTransition):
                self.kv.free(data.draw(st.sampled_from(dead)))

    # ---- after each ------------------------------------------------------------------------

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        stats = self.kv.stats()
        held = {block_id for model in self.models.values() for block_id in model.table}
        held |= {from_block for _, from_block, _ in self.pending}
        assert 0 <= self.kv.fragmentation_ratio() < 1
        assert stats.total == self.num_blocks
        assert stats.free + stats.cached + stats.held + stats.quarantined == stats.total
        assert (stats.free, stats.cached) == (len(self.empty), len(self.cached))
        assert (stats.held, stats.quarantined) == (len(held), len(self.quarantined))
        for content, block_id in self.index.items():
            assert self.memory[block_id] == content

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for sequence_id in list(self.models):
            self.free(sequence_id)
        self.kv.release_quarantine(self.quarantined)
        assert self.kv.stats().held == self.kv.stats().quarantined == 0
        self.kv.check_integrity()


def test_two_thousand_operations() -> None:
    run_state_machine_as_test(
        ManagerMachine, settings=settings(max_examples=50, stateful_step_count=60, deadline=None)
    )


@pytest.mark.slow
def test_twenty_thousand_operations() -> None:
    run_state_machine_as_test(
        ManagerMachine, settings=settings(max_examples=200, stateful_step_count=100, deadline=None)
    )
