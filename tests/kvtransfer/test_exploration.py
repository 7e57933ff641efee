"""The handoff protocol, explored exhaustively: one handoff, then two at once.

Two handoffs between one source and one target share three things only: the blocks they take and
give back, the connection, and the processes that may crash. So the joint states are pairs of
single states, and the joint steps are steps of one side of the pair (taking a block only if the
other has left one) or a connection loss or crash, which moves both. Every pair is visited, breadth
first. That the real machines keep two handoffs as far apart as this says is checked by driving
both at once in one machine and projecting every step: it must be a step of exactly one of them.

The pairs are symmetric (either handoff may be called the first), so one half of the matrix is
the transpose of the other, and rows are moved once for both.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest

from kvtransfer.errors import IllegalTransition
from kvtransfer.handoff.records import SourceRecord, TargetRecord
from kvtransfer.handoff.table import TERMINAL, HandoffState
from kvtransfer.handoff.target import TargetMachine
from tests.kvtransfer.model import FAULTS, HANDOFF_ID, Violation, World

_S = HandoffState
SHARED: dict[str, Callable[[World], None]] = {
    "source loses": World.lose_target,
    "target loses": World.lose_source,
    "source crashes": World.crash_source,
    "target crashes": World.crash_target,
}


@dataclass
class Graph:
    """All states of one handoff, numbered, and the steps between them."""

    worlds: list[World] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)
    steps: list[tuple[int, str, int]] = field(default_factory=list)

    def number(self, world: World) -> int:
        """Its number; a new one if it was never seen."""
        key = world.key()
        number = self.numbers.setdefault(key, len(self.worlds))
        if number == len(self.worlds):
            self.worlds.append(world)
        return number

    def reaching(self, goals: set[int], without: frozenset[str]) -> set[int]:
        """States from which a goal can be reached without steps of these labels."""
        return _closure(goals, [(t, h) for h, label, t in self.steps if label not in without])

    def reachable(self, without: frozenset[str]) -> set[int]:
        """States that can be reached from the start without steps of these labels."""
        return _closure({0}, [(h, t) for h, label, t in self.steps if label not in without])

    @cached_property
    def after(self) -> dict[int, set[tuple[str, int]]]:
        """What may come after each state."""
        after: dict[int, set[tuple[str, int]]] = {here: set() for here in range(len(self.worlds))}
        for here, label, there in self.steps:
            after[here].add((label, there))
        return after


def _closure(starts: set[int], edges: list[tuple[int, int]]) -> set[int]:
    following: dict[int, list[int]] = {}
    for here, there in edges:
        following.setdefault(here, []).append(there)
    found, frontier = set(starts), list(starts)
    while frontier:
        for state in following.get(frontier.pop(), []):
            if state not in found:
                found.add(state)
                frontier.append(state)
    return found


def explore() -> Graph:
    """Every state of one handoff. Raises Violation at the first bad one."""
    graph = Graph()
    graph.number(World.start(1, 1, 1))
    here = 0
    while here < len(graph.worlds):
        for label, world in graph.worlds[here].steps():
            graph.steps.append((here, label, graph.number(world)))
        here += 1
    return graph


single = cache(explore)


def has_ended(world: World, side: str, state: HandoffState) -> bool:
    return any((s, st) == (side, state) for s, _, st in world.ground.ended)


def test_one_handoff_reaches_every_ending_and_breaks_no_rule() -> None:
    graph = single()
    print(f"\none handoff: {len(graph.worlds)} states, {len(graph.steps)} steps")
    endings = {
        (
            next((st for s, _, st in w.ground.ended if s == "source"), None),
            next((st for s, _, st in w.ground.ended if s == "target"), None),
        )
        for w in graph.worlds
    }
    both = {(s, t) for s, t in endings if s is not None and t is not None}
    assert {s for s, _ in both} == {_S.RELEASED, _S.CANCELLED, _S.FAILED}
    assert {t for _, t in both} == {_S.LANDED, _S.CANCELLED, _S.FAILED}
    assert (_S.RELEASED, _S.LANDED) in both
    assert not {(_S.RELEASED, _S.CANCELLED), (_S.RELEASED, _S.FAILED)} & both


def test_from_every_state_a_handoff_comes_to_its_end() -> None:
    """No fault, cancellation or refusal is needed for it: frames and timers are enough."""
    graph = single()
    over = {number for number, world in enumerate(graph.worlds) if world.is_over()}
    stuck = set(range(len(graph.worlds))) - graph.reaching(over, FAULTS | {"refuse"})
    assert not stuck, graph.worlds[min(stuck)].key()


def test_without_faults_a_handoff_can_always_still_succeed() -> None:
    """Drop, duplicate and reorder alone never doom it: what is repeated heals what is lost."""
    graph = single()
    unkind = FAULTS | {"expire", "refuse"}
    done = {
        number
        for number, world in enumerate(graph.worlds)
        if has_ended(world, "source", _S.RELEASED) and has_ended(world, "target", _S.LANDED)
    }
    assert graph.reachable(unkind) <= graph.reaching(done, unkind)


class Pairs:
    """The joint states of two handoffs over ``blocks`` blocks on either side."""

    def __init__(self, graph: Graph, blocks: int) -> None:
        self.graph = graph
        count = len(graph.worlds)
        self.has_source = np.array([any(w.ground.source_blocks) for w in graph.worlds])
        self.has_target = np.array([any(w.ground.target_blocks) for w in graph.worlds])
        everywhere = np.ones(count, dtype=bool)
        self.no_source = ~self.has_source if blocks == 1 else everywhere
        self.no_target = ~self.has_target if blocks == 1 else everywhere
        self.shared = {name: self._moves(act) for name, act in SHARED.items()}

    def _moves(self, act: Callable[[World], None]) -> Any:
        """Where every single state goes when ``act`` happens to all handoffs at once."""
        moved = []
        for world in self.graph.worlds:
            after = World(world.ids, world.source.fork(), world.target.fork(), world.ground)
            act(after)
            moved.append(self.graph.numbers[after.key()])
        return np.array(moved)

    def room(self, label: str) -> Any:
        """For which states of the other handoff there is a block left for this step; None: all."""
        return {"offer": self.no_source, "grant": self.no_target}.get(label)

    def private_steps(self, without: frozenset[str]) -> list[tuple[int, int, Any]]:
        """Steps of one handoff that leave the other alone, and the room they need."""
        return [
            (here, there, self.room(label))
            for here, label, there in sorted(set(self.graph.steps))
            if here != there and label not in without
        ]

    def reached(self) -> tuple[Any, int]:
        """All joint states, as a matrix over pairs of single states, and the greatest depth."""
        steps = self.private_steps(without=frozenset({"lose", "crash"}))
        count = len(self.graph.worlds)
        reached = np.zeros((count, count), dtype=bool)
        reached[0, 0] = True
        frontier, depth = reached.copy(), 0
        while True:
            found = np.zeros_like(reached)
            is_busy = frontier.any(axis=1)
            for here, there, room in steps:
                if is_busy[here]:
                    found[there] |= frontier[here] if room is None else frontier[here] & room
            found |= found.T
            rows, columns = np.nonzero(frontier)
            for moved in self.shared.values():
                found[moved[rows], moved[columns]] = True
            frontier = found & ~reached
            if not frontier.any():
                return reached, depth
            reached |= frontier
            depth += 1

    def can_end(self, reached: Any) -> Any:
        """Joint states from which both come to their end without faults or refusals."""
        steps = self.private_steps(without=FAULTS | {"refuse"})
        over = np.array([world.is_over() for world in self.graph.worlds])
        ending = reached & over[:, None] & over[None, :]
        frontier = ending.copy()
        while frontier.any():
            found = np.zeros_like(reached)
            is_busy = frontier.any(axis=1)
            for here, there, room in steps:
                if is_busy[there]:
                    found[here] |= frontier[there] if room is None else frontier[there] & room
            found |= found.T
            frontier = found & reached & ~ending
            ending |= frontier
        return ending


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("blocks", [1, 2])
def test_two_handoffs_every_interleaving(blocks: int) -> None:
    pairs = Pairs(single(), blocks)
    reached, depth = pairs.reached()
    print(f"\ntwo handoffs, {blocks} blocks a side: {int(reached.sum())} states, depth {depth}")
    if blocks == 1:
        for holds in (pairs.has_source, pairs.has_target):
            assert not reached[np.ix_(holds, holds)].any(), "one block, two holders"
    stuck = np.argwhere(reached & ~pairs.can_end(reached))
    assert not len(stuck), [pairs.graph.worlds[n].key() for n in stuck[0]]


def joint_worlds(blocks: int, num_worlds: int, seed: int) -> Iterator[World]:
    """States of two handoffs in the same machines, by random walks from the start."""
    rng = random.Random(seed)
    world = World.start(2, blocks, blocks)
    for _ in range(num_worlds):
        yield world
        steps = [after for _, after in world.steps() if after.key() != world.key()]
        is_over = world.is_over() and len(world.ground.begun) == 4
        world = rng.choice(steps) if steps and not is_over else World.start(2, blocks, blocks)


def check_projection(pairs: Pairs, world: World) -> int:
    """Every step of the joint world is a step of one handoff, or a shared one; none is missing."""
    graph = pairs.graph
    numbers = [graph.numbers[canonical(world, i)] for i in world.ids]
    seen: set[tuple[int, int]] = set()
    for label, after in world.steps():
        moved = [graph.numbers[canonical(after, i)] for i in world.ids]
        if label in ("lose", "crash"):
            ways = [[int(f[n]) for n in numbers] for f in pairs.shared.values()]
            assert moved in ways, label
        elif moved != numbers:
            (mover,) = [index for index in (0, 1) if moved[index] != numbers[index]]
            seen.add((mover, moved[mover]))
    expected = {
        (mover, there)
        for mover in (0, 1)
        for label, there in graph.after[numbers[mover]]
        if label not in ("lose", "crash") and there != numbers[mover]
        if (room := pairs.room(label)) is None or room[numbers[1 - mover]]
    }
    assert seen == expected
    return len(seen)


def canonical(world: World, i: bytes) -> Any:
    """The key of one handoff's part of a joint world, under the id of the single exploration."""
    return renamed(world.only(i).key(), i, HANDOFF_ID)


def renamed(value: Any, old: bytes, new: bytes) -> Any:
    """``value``, however nested, with one handoff id for another."""
    if isinstance(value, tuple | frozenset):
        return type(value)(renamed(item, old, new) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        named = {f.name: renamed(getattr(value, f.name), old, new) for f in fields(value)}
        return replace(value, **named)
    return new if value == old else value


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(
    "num_worlds", [150, pytest.param(1500, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_two_handoffs_in_one_machine_are_two_single_ones(blocks: int, num_worlds: int) -> None:
    pairs = Pairs(single(), blocks)
    steps = sum(check_projection(pairs, w) for w in joint_worlds(blocks, num_worlds, seed=blocks))
    assert steps > num_worlds


def drained_too_early(record: Any) -> bool:
    return record.state in TERMINAL


def forgets_claims(self: TargetMachine, record: TargetRecord) -> bool:
    return record.state in (_S.RESERVED, _S.RECEIVING) and any(record.claimed)


def writes_whenever_known(self: TargetMachine, peer: str, handoff_id: bytes) -> Any:
    record = self.ledger.live.get(handoff_id)
    return record if record is not None and record.block_table else None


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (SourceRecord, "drained", property(drained_too_early)),
        (TargetRecord, "drained", property(drained_too_early)),
        (TargetMachine, "_all_written", forgets_claims),
        (TargetMachine, "_writable", writes_whenever_known),
    ],
)
def test_the_exploration_sees_broken_protocols(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, mutant: Any
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((Violation, IllegalTransition)):
        explore()
