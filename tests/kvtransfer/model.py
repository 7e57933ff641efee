"""A world of one source, one target and a lossy network, built on the real handoff machines.

The network is the set of all frames ever sent. Delivering takes nothing out of it, so every
state holds drop (never delivered), duplicate (delivered again) and reorder (any order) of every
frame, without a bound. Time is abstract: any timer may fire at any moment, and stamps are erased;
a live handoff's RENEW is always on the network. A handoff is ``LAYERS`` layers of one block.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvtransfer.handoff.frames import Cancel, First, Frame, Offer, Refuse, Renew, Send, Span
from kvtransfer.handoff.source import SourceMachine
from kvtransfer.handoff.table import HandoffState
from kvtransfer.handoff.target import TargetMachine
from kvtransfer.layout import KvLayout

LAYERS = 2
LAYOUT = KvLayout("float16", LAYERS, 1, 1, 1)
PEER = "peer"
HANDOFF_ID = b"a" * 16
OLD_S = -1000.0
FAULTS = frozenset({"cancel", "lose", "crash"})
_S = HandoffState

Blocks = tuple[bytes | None, ...]
Message = tuple[str, Any]
"""("source" | "target": where to, control frame), or ("data", (handoff id, span))."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Ground:
    """All that is not a machine: the network, the blocks, and what is in flight."""

    source_blocks: Blocks
    """Which handoff holds each block."""
    target_blocks: Blocks
    contents: tuple[tuple[bytes | None, ...], ...]
    """Per target block and layer: whose bytes were written there last."""
    network: frozenset[Message] = frozenset()
    reads: frozenset[tuple[bytes, int, Span]] = frozenset()
    """(handoff, block, span) being read at the source."""
    writes: frozenset[tuple[bytes, int, Span]] = frozenset()
    begun: frozenset[tuple[str, bytes]] = frozenset()
    """(side, handoff) offered, or expected."""
    ended: frozenset[tuple[str, bytes, HandoffState]] = frozenset()
    """(side, handoff, terminal state)."""
    dead: frozenset[str] = frozenset()
    """Sides that crashed."""


def give(blocks: Blocks, old: bytes | None, new: bytes | None) -> Blocks:
    """The first block that ``old`` holds now belongs to ``new``."""
    index = blocks.index(old)
    return (*blocks[:index], new, *blocks[index + 1 :])


def _is_about(content: Any, i: bytes) -> bool:
    if isinstance(content, tuple):
        return bool(content[0] == i)
    return i in content.handoff_ids if isinstance(content, Renew) else content.handoff_id == i


def offer_of(handoff_id: bytes) -> Offer:
    return Offer(handoff_id, "r", 1)


class World:
    """One state; ``steps`` yields all that may happen next, and checks it."""

    __slots__ = ("ground", "ids", "source", "target")

    def __init__(
        self, ids: tuple[bytes, ...], source: SourceMachine, target: TargetMachine, ground: Ground
    ) -> None:
        self.ids = ids
        self.source = source
        self.target = target
        self.ground = ground

    @classmethod
    def start(cls, num_handoffs: int, source_blocks: int, target_blocks: int) -> "World":
        """Nothing has happened."""
        ids = (HANDOFF_ID, b"b" * 16)[:num_handoffs]
        blank = ((None,) * LAYERS,) * target_blocks
        ground = Ground((None,) * source_blocks, (None,) * target_blocks, blank)
        return cls(ids, SourceMachine(LAYOUT), TargetMachine(LAYOUT), ground)

    def key(self) -> tuple[Any, ...]:
        """Equal for equal states, and only for them."""
        source, target = self.source.ledger, self.target.ledger
        return (
            frozenset(source.live.values()),
            frozenset((i, t.state, t.refused) for i, t in source.tombstones.items()),
            frozenset(target.live.values()),
            frozenset((i, t.state, t.refused) for i, t in target.tombstones.items()),
            self.ground,
        )

    def check(self) -> None:
        """What is being read or written belongs to the handoff that reads or writes it."""
        ground = self.ground
        if any(ground.source_blocks[block] != i for i, block, _ in ground.reads):
            raise Violation("a block was freed while it was being read")
        if any(ground.target_blocks[block] != i for i, block, _ in ground.writes):
            raise Violation("a block was given away while it was being written")

    def is_over(self) -> bool:
        """Everything begun has ended on each side that lives, and no block is held."""
        ended = {(side, handoff_id) for side, handoff_id, _ in self.ground.ended}
        begun = {(s, i) for s, i in self.ground.begun if s not in self.ground.dead}
        held = any(self.ground.source_blocks) or any(self.ground.target_blocks)
        live = self.source.ledger.live or self.target.ledger.live
        return begun <= ended and not held and not live

    def only(self, i: bytes) -> "World":
        """What this state is for one handoff alone: the same world without the others."""
        ground = self.ground
        source_block = next((i for holder in ground.source_blocks if holder == i), None)
        target_block = next((i for holder in ground.target_blocks if holder == i), None)
        blank: tuple[bytes | None, ...] = (None,) * LAYERS
        contents = dict(zip(ground.target_blocks, ground.contents, strict=True))
        alone = Ground(
            (source_block,),
            (target_block,),
            (contents[i] if target_block else blank,),
            frozenset(m for m in ground.network if _is_about(m[1], i)),
            frozenset((h, 0, span) for h, _, span in ground.reads if h == i),
            frozenset((h, 0, span) for h, _, span in ground.writes if h == i),
            frozenset(entry for entry in ground.begun if entry[1] == i),
            frozenset(entry for entry in ground.ended if entry[1] == i),
            ground.dead,
        )
        world = World((i,), self.source.fork(), self.target.fork(), alone)
        for ledger in (world.source.ledger, world.target.ledger):
            for other in [h for h in self.ids if h != i]:
                ledger.live.pop(other, None)  # type: ignore[attr-defined]
                ledger.tombstones.pop(other, None)
        for h, record in world.target.ledger.live.items():
            if record.block_table:
                world.target.ledger.live[h] = replace(record, block_table=(0,))
        return world

    def steps(self) -> Iterator[tuple[str, "World"]]:
        """Everything that may happen next: its label, and the state after it."""
        if "source" not in self.ground.dead:
            yield from self._source_steps()
        if "target" not in self.ground.dead:
            yield from self._target_steps()
        for message in self.ground.network:
            kind, content = message
            if kind == "data" and "target" not in self.ground.dead:
                yield from self._after("deliver", lambda w, c=content: w.write(*c))
            elif kind == "source" and "source" not in self.ground.dead:
                yield from self._after("deliver", lambda w, c=content: w.hear_at_source(c))
            elif kind == "target" and "target" not in self.ground.dead:
                yield from self._after("deliver", lambda w, c=content: w.hear_at_target(c))

    def _after(self, label: str, act: Callable[["World"], object]) -> Iterator[tuple[str, "World"]]:
        world = World(self.ids, self.source.fork(), self.target.fork(), self.ground)
        act(world)
        world.check()
        yield label, world

    def _source_steps(self) -> Iterator[tuple[str, "World"]]:
        ground, ledger = self.ground, self.source.ledger
        for i in self.ids:
            begun, record = ("source", i) in ground.begun, ledger.live.get(i)
            if not begun and None in ground.source_blocks:
                yield from self._after("offer", lambda w, i=i: w.offer(i))
            if not begun and i not in ledger.tombstones:
                yield from self._after("cancel", lambda w, i=i: w.cancel_source(i))
            if record is None:
                continue
            if any(read[0] == i for read in ground.reads):
                yield from self._after("end_read", lambda w, i=i: w.end_read(i))
            if record.stopped:
                continue
            if record.first is None:
                yield from self._after("first", lambda w, i=i: w.first(i))
            if record.state in (_S.GRANTED, _S.SENDING) and not record.num_reads:
                yield from self._after("read", lambda w, i=i: w.read(i))
            yield from self._after("cancel", lambda w, i=i: w.cancel_source(i))
            yield from self._after("expire", lambda w, i=i: w.expire_source(i))
        if ledger.live:
            yield from self._after("lose", lambda w: w.lose_target())
        yield from self._after("crash", lambda w: w.crash_source())

    def _target_steps(self) -> Iterator[tuple[str, "World"]]:
        ground, ledger = self.ground, self.target.ledger
        for i in self.ids:
            begun, record = ("target", i) in ground.begun, ledger.live.get(i)
            if not begun:
                yield from self._after("expect", lambda w, i=i: w.expect(i))
                if i not in ledger.tombstones:
                    yield from self._after("cancel", lambda w, i=i: w.cancel_target(i))
            if ("target", i, _S.LANDED) in ground.ended and i in ground.target_blocks:
                yield from self._after("finish", lambda w, i=i: w.finish(i))
            if record is None:
                continue
            if any(write[0] == i for write in ground.writes):
                yield from self._after("end_write", lambda w, i=i: w.end_write(i))
            if record.stopped:
                continue
            if record.state is _S.EXPECTED and begun and record.offer is not None:
                if None in ground.target_blocks:
                    yield from self._after("grant", lambda w, i=i: w.grant(i))
                yield from self._after("wait", lambda w, i=i: w.say_wait(i))
                yield from self._after("refuse", lambda w, i=i: w.refuse(i))
            yield from self._after("cancel", lambda w, i=i: w.cancel_target(i))
            yield from self._after("expire", lambda w, i=i: w.expire_target(i))
        if ledger.live:
            yield from self._after("lose", lambda w: w.lose_source())
        yield from self._after("crash", lambda w: w.crash_target())

    # What happens at the source

    def offer(self, i: bytes) -> None:
        self._set(
            begun=self.ground.begun | {("source", i)},
            source_blocks=give(self.ground.source_blocks, None, i),
        )
        self._take_source(self.source.offer(PEER, offer_of(i), 0.0))

    def first(self, i: bytes) -> None:
        self._take_source(self.source.set_first(First(i, 1, 7), 0.0))

    def read(self, i: bytes) -> None:
        span = self.source.next_read(i, (1,) * LAYERS, 1)
        if span is None:
            return
        if i not in self.ground.source_blocks:
            raise Violation("the source reads a block that it has let go")
        block = self.ground.source_blocks.index(i)
        self._set(reads=self.ground.reads | {(i, block, span)})

    def end_read(self, i: bytes) -> None:
        read = next(read for read in self.ground.reads if read[0] == i)
        self._set(
            reads=self.ground.reads - {read},
            network=self.ground.network | {("data", (i, read[2]))},
        )
        self._take_source(self.source.end_read(i, 0.0))

    def cancel_source(self, i: bytes) -> None:
        self._take_source(self.source.cancel(i, "", 0.0))

    def expire_source(self, i: bytes) -> None:
        live = self.source.ledger.live
        live[i] = replace(live[i], heard_s=OLD_S, asked_s=OLD_S)
        self._take_source(self.source.tick(0.0))

    def lose_target(self) -> None:
        self._take_source(self.source.lose_peer(PEER, "", 0.0))

    def crash_source(self) -> None:
        self.source = SourceMachine(LAYOUT)
        free = (None,) * len(self.ground.source_blocks)
        self._set(dead=self.ground.dead | {"source"}, source_blocks=free, reads=frozenset[Any]())

    def hear_at_source(self, frame: Frame) -> None:
        self._take_source(self.source.on_frame(PEER, frame, 0.0))

    def _take_source(self, actions: Iterable[Any]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send("target", action.frame)
            elif action.record.drained:
                i, state = action.record.handoff_id, action.record.state
                self._end("source", i, state)
                self._set(source_blocks=give(self.ground.source_blocks, i, None))
        live = self.source.ledger.live
        for i, record in live.items():
            if record.reason:
                live[i] = replace(record, reason="")
            if not record.stopped:
                self._send("target", Renew((i,)))

    # What happens at the target

    def expect(self, i: bytes) -> None:
        if i in self.target.ledger.tombstones:
            return  # the request learns at once that it is over
        self._set(begun=self.ground.begun | {("target", i)})
        self._take_target(self.target.expect(i, "r", 0.0))

    def grant(self, i: bytes) -> None:
        block = self.ground.target_blocks.index(None)
        self._set(target_blocks=give(self.ground.target_blocks, None, i))
        self._take_target(self.target.grant(i, (block,), 0, 0.0))

    def say_wait(self, i: bytes) -> None:
        self._take_target(self.target.wait(i))

    def refuse(self, i: bytes) -> None:
        self._take_target(self.target.refuse(i, "", 0.0))

    def write(self, i: bytes, span: Span) -> None:
        blocks, actions = self.target.begin_write(PEER, i, span, 0.0)
        if blocks:
            self._set(writes=self.ground.writes | {(i, blocks[0], span)})
        self._take_target(actions)

    def end_write(self, i: bytes) -> None:
        write = next(write for write in self.ground.writes if write[0] == i)
        _, block, span = write
        layers = list(self.ground.contents[block])
        layers[span.layer] = i
        contents = list(self.ground.contents)
        contents[block] = tuple(layers)
        self._set(writes=self.ground.writes - {write}, contents=tuple(contents))
        self._take_target(self.target.end_write(i, 0.0))

    def finish(self, i: bytes) -> None:
        block = self.ground.target_blocks.index(i)
        if set(self.ground.contents[block]) != {i}:
            raise Violation("a published block holds another handoff's bytes")
        self._free_target(i)

    def cancel_target(self, i: bytes) -> None:
        self._take_target(self.target.cancel(i, "", 0.0))

    def expire_target(self, i: bytes) -> None:
        live = self.target.ledger.live
        live[i] = replace(live[i], born_s=OLD_S, heard_s=OLD_S, progress_s=OLD_S)
        self._take_target(self.target.tick(0.0))

    def lose_source(self) -> None:
        self._take_target(self.target.lose_peer(PEER, "", 0.0))

    def crash_target(self) -> None:
        self.target = TargetMachine(LAYOUT)
        free = (None,) * len(self.ground.target_blocks)
        self._set(dead=self.ground.dead | {"target"}, target_blocks=free, writes=frozenset[Any]())

    def hear_at_target(self, frame: Frame) -> None:
        self._take_target(self.target.on_frame(PEER, frame, 0.0))

    def _take_target(self, actions: Iterable[Any]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send("source", action.frame)
            elif action.record.drained:
                record = action.record
                self._end("target", record.handoff_id, record.state)
                if record.state is _S.LANDED:
                    self._check_landed(record)
                elif record.handoff_id in self.ground.target_blocks:
                    self._free_target(record.handoff_id)
        live = self.target.ledger.live
        for i, record in live.items():
            if record.reason:
                live[i] = replace(record, reason="")
            if record.peer is not None and not record.stopped:
                self._send("source", Renew((i,)))

    def _free_target(self, i: bytes) -> None:
        block = self.ground.target_blocks.index(i)
        contents = list(self.ground.contents)
        contents[block] = (None,) * LAYERS
        blocks = give(self.ground.target_blocks, i, None)
        self._set(target_blocks=blocks, contents=tuple(contents))

    def _check_landed(self, record: Any) -> None:
        i = record.handoff_id
        if i not in self.ground.target_blocks:
            raise Violation("landed in a block it does not hold")
        if set(self.ground.contents[self.ground.target_blocks.index(i)]) != {i}:
            raise Violation("published before every layer landed")
        if record.first is None:
            raise Violation("landed without a first token")

    # Both

    def _send(self, to: str, frame: Frame) -> None:
        if isinstance(frame, Cancel | Refuse) and frame.reason:
            frame = replace(frame, reason="")
        if (to, frame) not in self.ground.network:
            self._set(network=self.ground.network | {(to, frame)})

    def _end(self, side: str, i: bytes, state: HandoffState) -> None:
        if any((s, h) == (side, i) for s, h, _ in self.ground.ended):
            raise Violation(f"a handoff ended twice at the {side}")
        if side == "source" and state is _S.RELEASED and not self._has_landed(i):
            raise Violation("the source let go of what has not landed")
        self._set(ended=self.ground.ended | {(side, i, state)})

    def _has_landed(self, i: bytes) -> bool:
        return ("target", i, _S.LANDED) in self.ground.ended

    def _set(self, **changes: Any) -> None:
        self.ground = replace(self.ground, **changes)
