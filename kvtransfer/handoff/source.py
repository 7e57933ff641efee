"""The source's half of the handoff protocol: every decision, no I/O, no clock.

Takes events (a frame came, a local command, the time) and returns actions (send a frame, a
handoff changed). Knows nothing of memory, streams or tasks: ``kvtransfer.source`` carries the
actions out, and the exploration in the tests drives this same class through every interleaving.

Ownership: from ``offer`` until a record is ``drained`` the handoff's blocks may be read by it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from kvtransfer.handoff.frames import (
    LEASE_S,
    RENEW_S,
    Cancel,
    Cancelled,
    Changed,
    First,
    Frame,
    Grant,
    HandoffFrame,
    Landed,
    Offer,
    Refuse,
    Renew,
    Send,
    Sent,
    Span,
    Wait,
)
from kvtransfer.handoff.ledger import Ledger
from kvtransfer.handoff.records import SourceRecord
from kvtransfer.handoff.table import TERMINAL, HandoffEvent, HandoffState, Role, advance
from kvtransfer.layout import KvLayout

_S, _E = HandoffState, HandoffEvent


Action = Send | Changed[SourceRecord]


class SourceMachine:
    """All handoffs of one source, over all its connections."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        self._renewed_s = 0.0
        self._announced: dict[bytes, str] = {}
        self.ledger: Ledger[SourceRecord] = Ledger()

    def fork(self) -> Self:
        """An independent copy."""
        other = type(self)(self._layout)
        other._announced = dict(self._announced)
        other.ledger = self.ledger.fork()
        return other

    # Local commands

    def announce(self, peer: str, handoff_id: bytes) -> None:
        """It will be offered, in its turn: until then it is renewed, so the target waits."""
        if handoff_id not in self.ledger.tombstones:
            self._announced[handoff_id] = peer

    def offer(self, peer: str, offer: Offer, now: float) -> list[Action]:
        """Begin a handoff; one that was cancelled before it began ends at once.

        Raises:
            KvTransferError: the id is in use.
        """
        self._announced.pop(offer.handoff_id, None)
        record = SourceRecord(peer, offer, heard_s=now, asked_s=now)
        grave = self.ledger.tombstones.get(offer.handoff_id)
        if grave is not None:
            reason = grave.reason or "this handoff is over"
            return [Changed(replace(record, state=_S.CANCELLED, reason=reason))]
        self.ledger.open(record)
        return [Send(peer, offer), Changed(record)]

    def set_first(self, first: First, now: float) -> list[Action]:
        """The first output token is sampled. Ignored when the handoff is over."""
        record = self.ledger.live.get(first.handoff_id)
        if record is None or record.stopped or record.first is not None:
            return []
        actions: list[Action] = [Send(record.peer, first)]
        return actions + self._settle(replace(record, first=first), now)

    def next_read(
        self, handoff_id: bytes, readable_tokens: Sequence[int], max_blocks: int
    ) -> Span | None:
        """Begin to read the next frame: at most ``max_blocks`` blocks of the first layer that
        has readable ones. None: nothing may be read now. ``end_read`` must follow."""
        record = self.ledger.live.get(handoff_id)
        if record is None or record.state not in (_S.GRANTED, _S.SENDING):
            return None
        for layer, cursor in enumerate(record.cursors):
            count = self._readable_blocks(record, readable_tokens[layer]) - cursor
            if count <= 0:
                continue
            count = min(count, max_blocks)
            cursors = (*record.cursors[:layer], cursor + count, *record.cursors[layer + 1 :])
            self.ledger.live[handoff_id] = replace(
                record,
                state=advance(Role.SOURCE, record.state, _E.SEND),
                cursors=cursors,
                num_reads=record.num_reads + 1,
                num_frames=record.num_frames + 1,
                num_bytes=record.num_bytes + count * self._layout.region_bytes,
            )
            return Span(layer, cursor, count)
        return None

    def end_read(self, handoff_id: bytes, now: float) -> list[Action]:
        """A frame begun by ``next_read`` will not be read any more."""
        record = self.ledger.live[handoff_id]
        return self._settle(replace(record, num_reads=record.num_reads - 1), now)

    def cancel(self, handoff_id: bytes, reason: str, now: float) -> list[Action]:
        """Give a handoff up. Unknown ids leave a tombstone; ended ones are left alone."""
        record = self.ledger.live.get(handoff_id)
        if record is not None:
            return self._stop(record, _E.CANCEL, reason, now)
        if handoff_id not in self.ledger.tombstones:
            self.ledger.bury(handoff_id, _S.CANCELLED, reason, False, now)
        peer = self._announced.pop(handoff_id, None)
        return [Send(peer, Cancel(handoff_id, reason))] if peer is not None else []

    def lose_peer(self, peer: str, reason: str, now: float) -> list[Action]:
        """The connection broke: every live handoff on it fails, announcements are over."""
        self._announced = {i: other for i, other in self._announced.items() if other != peer}
        actions: list[Action] = []
        for record in list(self.ledger.live.values()):
            if record.peer == peer:
                actions += self._stop(record, _E.FAIL, reason, now, tell=False)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Time passed: end what is silent, repeat what is unanswered, renew leases."""
        actions: list[Action] = []
        for record in list(self.ledger.live.values()):
            if record.state in TERMINAL or record.stopped:
                continue
            if now - record.heard_s >= LEASE_S:
                reason = f"the target was silent for {LEASE_S:g} s"
                actions += self._stop(record, _E.FAIL, reason, now)
            elif now - record.asked_s >= RENEW_S and record.state in (_S.OFFERED, _S.SENT):
                record = replace(record, asked_s=now)
                self.ledger.live[record.handoff_id] = record
                actions.append(Send(record.peer, self._question(record)))
        if now - self._renewed_s >= RENEW_S:
            self._renewed_s = now
            actions += self.ledger.renewals()
            actions += self._announcements()
        self.ledger.sweep(now)
        return actions

    # Frames

    def on_frame(self, peer: str, frame: Frame, now: float) -> list[Action]:
        """A control frame came over ``peer``."""
        if isinstance(frame, Renew):
            return list(self.ledger.renew(peer, frame, now))
        record = self.ledger.live.get(frame.handoff_id)
        if record is None:
            if isinstance(frame, Cancel) and frame.handoff_id not in self.ledger.tombstones:
                self._announced.pop(frame.handoff_id, None)
                self.ledger.bury(frame.handoff_id, _S.CANCELLED, frame.reason, False, now)
                return []
            return list(self.ledger.answer_late(peer, frame))
        if record.peer != peer:
            self.ledger.refuse("foreign")
            return []
        if record.stopped:
            self.ledger.refuse("late")
            return []
        return self._apply(record.heard(now), frame, now)

    def _apply(self, record: SourceRecord, frame: HandoffFrame, now: float) -> list[Action]:
        match frame, record.state:
            case Grant(num_held_tokens=held), _S.OFFERED:
                return self._granted(record, held, now)
            case Wait(), _S.OFFERED:
                pass
            case Refuse(reason=reason), _S.OFFERED:
                record = replace(record, refused=True)
                return self._stop(record, _E.REFUSE, reason, now, tell=False)
            case Landed(), _S.SENT:
                return self._keep(replace(record, state=self._after(record, _E.LAND)), now)
            case Cancel(reason=reason), _:
                return self._stop(record, _E.CANCEL, f"cancelled by the target: {reason}", now)
            case Cancelled(), _:
                return self._stop(record, _E.CANCEL, "cancelled by the target", now)
            case ((Grant() | Wait() | Refuse()), _):
                self.ledger.refuse("duplicate")
            case _:
                self.ledger.refuse("unexpected")
        self.ledger.live[record.handoff_id] = record
        return []

    def _granted(self, record: SourceRecord, held: int, now: float) -> list[Action]:
        num_tokens, block_size = record.offer.num_tokens, self._layout.block_size
        if held > num_tokens or (held % block_size and held != num_tokens):
            reason = f"the target granted from token {held} of {num_tokens}: not a block boundary"
            return self._stop(record, _E.FAIL, reason, now)
        record = replace(
            record,
            state=self._after(record, _E.GRANT),
            num_held_tokens=held,
            cursors=(self._layout.num_blocks_for(held),) * self._layout.num_layers,
        )
        return self._settle(record, now)

    # Inside

    def _announcements(self) -> list[Action]:
        """One RENEW for each connection over which offers will come."""
        by_peer: dict[str, list[bytes]] = {}
        for handoff_id, peer in self._announced.items():
            by_peer.setdefault(peer, []).append(handoff_id)
        return [Send(peer, Renew(tuple(ids))) for peer, ids in by_peer.items()]

    def _readable_blocks(self, record: SourceRecord, num_tokens: int) -> int:
        """Blocks whose prompt tokens are all among the first ``num_tokens``."""
        if num_tokens >= record.offer.num_tokens:
            return self._layout.num_blocks_for(record.offer.num_tokens)
        return num_tokens // self._layout.block_size

    def _settle(self, record: SourceRecord, now: float) -> list[Action]:
        """Take the step that is due without further events: SENT, or the end of a drain."""
        actions: list[Action] = []
        if record.num_reads == 0:
            if record.state is _S.CANCELLING:
                record = replace(record, state=self._after(record, _E.DRAIN))
                actions.append(Send(record.peer, Cancelled(record.handoff_id)))
            elif record.first is not None and self._all_read(record):
                record = replace(record, state=self._after(record, _E.FINISH), asked_s=now)
                actions.append(Send(record.peer, self._question(record)))
        return actions + self._keep(record, now)

    def _all_read(self, record: SourceRecord) -> bool:
        if record.state not in (_S.GRANTED, _S.SENDING):
            return False
        num_blocks = self._layout.num_blocks_for(record.offer.num_tokens)
        return all(cursor == num_blocks for cursor in record.cursors)

    def _stop(
        self, record: SourceRecord, event: HandoffEvent, reason: str, now: float, tell: bool = True
    ) -> list[Action]:
        """End a handoff otherwise than well, once; the first reason stands."""
        if record.stopped or record.state in TERMINAL:
            return []
        record = replace(record, state=self._after(record, event), reason=reason)
        actions: list[Action] = [Send(record.peer, Cancel(record.handoff_id, reason))]
        return (actions if tell else []) + self._settle(record, now)

    def _keep(self, record: SourceRecord, now: float) -> list[Action]:
        self.ledger.update(record, now)
        return [Changed(record)]

    def _after(self, record: SourceRecord, event: HandoffEvent) -> HandoffState:
        return advance(Role.SOURCE, record.state, event)

    def _question(self, record: SourceRecord) -> Frame:
        """What awaits an answer."""
        if record.state is _S.OFFERED:
            return record.offer
        assert record.first is not None, "SENT implies a first token"
        return Sent(record.handoff_id, record.num_frames, record.num_bytes, record.first)
