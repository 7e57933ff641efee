"""The handoffs one end knows: live ones, tombstones of ended ones, and refused frames by reason.

Pure; shared by the source's and the target's machine, which alone decide what happens.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from kvtransfer.errors import KvTransferError
from kvtransfer.handoff.frames import (
    HANDOFF_ID_BYTES,
    MAX_TOMBSTONES,
    TOMBSTONE_S,
    Cancel,
    Cancelled,
    HandoffFrame,
    Landed,
    Offer,
    Refuse,
    Renew,
    Send,
    Sent,
)
from kvtransfer.handoff.table import HandoffState


class Record(Protocol):
    """What the ledger needs to know of a handoff."""

    @property
    def handoff_id(self) -> bytes: ...
    @property
    def peer(self) -> str | None: ...
    @property
    def state(self) -> HandoffState: ...
    @property
    def reason(self) -> str: ...
    @property
    def refused(self) -> bool: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def drained(self) -> bool: ...
    def heard(self, now: float) -> Self: ...


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """How a handoff ended, kept so that nothing of it can come back."""

    state: HandoffState
    reason: str
    refused: bool
    buried_s: float


class Ledger(Generic[R]):
    """Live handoffs and tombstones by handoff id."""

    def __init__(self) -> None:
        self.live: dict[bytes, R] = {}
        self.tombstones: dict[bytes, Tombstone] = {}
        self.refused_frames: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()

    def fork(self) -> Self:
        """A copy that shares only immutable values: what the exploration branches on."""
        other = type(self)()
        other.live = dict(self.live)
        other.tombstones = dict(self.tombstones)
        return other

    def refuse(self, reason: str) -> None:
        """Count a frame that was not applied."""
        self.refused_frames[reason] += 1

    def open(self, record: R) -> None:
        """A new handoff.

        Raises:
            KvTransferError: its id is in use, or no id; ids are random per attempt.
        """
        if len(record.handoff_id) != HANDOFF_ID_BYTES:
            raise KvTransferError(
                f"a handoff id has {HANDOFF_ID_BYTES} bytes, not {len(record.handoff_id)}"
            )
        if record.handoff_id in self.live:
            raise KvTransferError(f"handoff {record.handoff_id.hex()} is already running here")
        self.live[record.handoff_id] = record

    def update(self, record: R, now: float) -> None:
        """Keep what ``record`` is now; bury it when nothing of it is left to do."""
        if not record.drained:
            self.live[record.handoff_id] = record
            return
        del self.live[record.handoff_id]
        self.outcomes["refused" if record.refused else record.state.name.lower()] += 1
        self.bury(record.handoff_id, record.state, record.reason, record.refused, now)

    def bury(
        self, handoff_id: bytes, state: HandoffState, reason: str, refused: bool, now: float
    ) -> None:
        """Remember how a handoff ended. The oldest tombstones make room."""
        self.tombstones.pop(handoff_id, None)
        self.tombstones[handoff_id] = Tombstone(state, reason, refused, now)
        if len(self.tombstones) > MAX_TOMBSTONES:
            del self.tombstones[next(iter(self.tombstones))]

    def sweep(self, now: float) -> None:
        """Forget tombstones nobody can ask about any more. Oldest come first in the dict."""
        while self.tombstones:
            oldest = next(iter(self.tombstones))
            if now - self.tombstones[oldest].buried_s < TOMBSTONE_S:
                return
            del self.tombstones[oldest]

    def renewals(self) -> list[Send]:
        """One RENEW for each connection: everything on it that is alive here."""
        by_peer: dict[str, list[bytes]] = {}
        for record in self.live.values():
            if record.peer is not None and not record.stopped:
                by_peer.setdefault(record.peer, []).append(record.handoff_id)
        return [Send(peer, Renew(tuple(ids))) for peer, ids in by_peer.items()]

    def renew(self, peer: str, frame: Renew, now: float) -> list[Send]:
        """A peer renewed its handoffs; it is told of those that failed or were cancelled here."""
        answers: list[Send] = []
        for handoff_id in frame.handoff_ids:
            record = self.live.get(handoff_id)
            if record is None:
                answers += self.answer_dead(peer, handoff_id)
            elif record.peer in (peer, None):
                # A target that has no offer yet: the source says that one will come.
                self.live[handoff_id] = record.heard(now)
            else:
                self.refuse("foreign")
        return answers

    def answer_late(self, peer: str, frame: HandoffFrame) -> list[Send]:
        """What to say to a frame whose handoff is not live here: nothing, or how it ended.

        A lost LANDED is repeated to a repeated SENT, a lost CANCEL to whatever shows that the
        peer still believes; an ending is never answered, or two tombstones would talk for ever.
        """
        tombstone = self.tombstones.get(frame.handoff_id)
        if tombstone is None:
            self.refuse("unknown")
            return []
        if isinstance(frame, Landed | Cancel | Cancelled | Refuse):
            return []
        if tombstone.state is HandoffState.LANDED and isinstance(frame, Sent):
            return [Send(peer, Landed(frame.handoff_id))]
        self.refuse("late")
        return self.answer_dead(peer, frame.handoff_id, is_offer=isinstance(frame, Offer))

    def answer_dead(self, peer: str, handoff_id: bytes, is_offer: bool = False) -> list[Send]:
        """Tell a peer that still believes in a handoff which failed or was cancelled here."""
        tombstone = self.tombstones.get(handoff_id)
        if tombstone is None or tombstone.state not in (
            HandoffState.FAILED,
            HandoffState.CANCELLED,
        ):
            return []
        if is_offer and tombstone.refused:
            return [Send(peer, Refuse(handoff_id, tombstone.reason))]
        return [Send(peer, Cancel(handoff_id, tombstone.reason))]
