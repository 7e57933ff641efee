"""The target's half of the handoff protocol: every decision, no I/O, no clock.

The mirror of ``handoff.source``: events in, actions out; carried out by ``kvtransfer.target``,
driven through every interleaving by the exploration in the tests.

Ownership: from ``grant`` until a record is ``drained`` the granted blocks may be written by this
handoff and by nothing else. ``begin_write`` alone names the blocks a data frame goes to.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from kvtransfer.errors import KvTransferError
from kvtransfer.handoff.frames import (
    HALF_S,
    LEASE_S,
    RENEW_S,
    STALL_S,
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
from kvtransfer.handoff.records import TargetRecord
from kvtransfer.handoff.table import TERMINAL, HandoffEvent, HandoffState, Role, advance
from kvtransfer.layout import KvLayout

_S, _E = HandoffState, HandoffEvent


Action = Send | Changed[TargetRecord]


class TargetMachine:
    """All handoffs of one target, over all its connections."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        self._renewed_s = 0.0
        self.ledger: Ledger[TargetRecord] = Ledger()

    def fork(self) -> Self:
        """An independent copy."""
        other = type(self)(self._layout)
        other.ledger = self.ledger.fork()
        return other

    # Local commands

    def expect(self, handoff_id: bytes, request_id: str, now: float) -> list[Action]:
        """A request wants this handoff; its offer may be here already, or be over already.

        Raises:
            KvTransferError: the id is expected already.
        """
        record = self.ledger.live.get(handoff_id)
        if record is None:
            record = TargetRecord(handoff_id, now, now, now, request_id=request_id)
            grave = self.ledger.tombstones.get(handoff_id)
            if grave is not None:
                reason = grave.reason or "this handoff is over"
                return [Changed(replace(record, state=_S.CANCELLED, reason=reason))]
            self.ledger.open(record)
            return [Changed(record)]
        if record.request_id is not None:
            raise KvTransferError(f"handoff {handoff_id.hex()} is already expected here")
        return self._pair(replace(record, request_id=request_id), now)

    def wait(self, handoff_id: bytes) -> list[Action]:
        """No blocks now: the source keeps offering."""
        record = self.ledger.live.get(handoff_id)
        if record is None or record.state is not _S.EXPECTED:
            return []
        self.ledger.live[handoff_id] = replace(record, waiting=True)
        return self._say(record, Wait(handoff_id))

    def grant(
        self, handoff_id: bytes, block_table: Sequence[int], num_held_tokens: int, now: float
    ) -> list[Action]:
        """Blocks are reserved; the source may send what lies after ``num_held_tokens``.

        Raises:
            KvTransferError: offer or request is not here, or the blocks do not fit.
        """
        record = self.ledger.live.get(handoff_id)
        if record is None or record.offer is None:
            raise KvTransferError(f"handoff {handoff_id.hex()}: nothing to grant, no offer is here")
        if record.request_id is None:
            raise KvTransferError(f"handoff {handoff_id.hex()}: nothing to grant, nobody wants it")
        num_tokens = record.offer.num_tokens
        num_blocks = self._layout.num_blocks_for(num_tokens)
        if len(block_table) < num_blocks or len(set(block_table[:num_blocks])) < num_blocks:
            raise KvTransferError(f"{num_tokens} tokens need {num_blocks} distinct blocks")
        on_boundary = num_held_tokens % self._layout.block_size == 0
        if not 0 <= num_held_tokens <= num_tokens or not (
            on_boundary or num_held_tokens == num_tokens
        ):
            raise KvTransferError(f"{num_held_tokens} held tokens do not end at a block boundary")
        record = replace(
            record,
            state=self._after(record, _E.GRANT),
            num_held_tokens=num_held_tokens,
            block_table=tuple(block_table[:num_blocks]),
            claimed=(0,) * self._layout.num_layers,
            progress_s=now,
        )
        self.ledger.live[handoff_id] = record
        return [*self._say(record, Grant(handoff_id, num_held_tokens)), Changed(record)]

    def refuse(self, handoff_id: bytes, reason: str, now: float) -> list[Action]:
        """Never."""
        record = self.ledger.live.get(handoff_id)
        if record is None or record.state is not _S.EXPECTED:
            return []
        return self._refuse(record, reason, now)

    def cancel(self, handoff_id: bytes, reason: str, now: float) -> list[Action]:
        """Give a handoff up. Unknown ids leave a tombstone; ended ones are left alone."""
        record = self.ledger.live.get(handoff_id)
        if record is not None:
            return self._stop(record, _E.CANCEL, reason, now)
        if handoff_id not in self.ledger.tombstones:
            self.ledger.bury(handoff_id, _S.CANCELLED, reason, False, now)
        return []

    def lose_peer(self, peer: str, reason: str, now: float) -> list[Action]:
        """The connection broke: every live handoff on it fails."""
        actions: list[Action] = []
        for record in list(self.ledger.live.values()):
            if record.peer == peer:
                actions += self._stop(record, _E.FAIL, reason, now, tell=False)
        return actions

    # Data

    def begin_write(
        self, peer: str, handoff_id: bytes, span: Span, now: float
    ) -> tuple[tuple[int, ...], list[Action]]:
        """Where a data frame's blocks go. No blocks: the frame is refused and counted.

        A frame that can never be right fails its handoff; one that is merely late, foreign or
        doubled is dropped. ``end_write`` must follow when blocks were named.
        """
        record = self._writable(peer, handoff_id)
        if record is None:
            return (), []
        end = span.first_block + span.num_blocks
        first_missing = self._layout.num_blocks_for(record.num_held_tokens)
        inside = first_missing <= span.first_block < end <= len(record.block_table)
        if not inside or span.layer >= self._layout.num_layers:
            return (), self.damaged(peer, handoff_id, "a frame lies outside the grant", now)
        bits = ((1 << span.num_blocks) - 1) << span.first_block
        claimed = record.claimed[span.layer]
        if claimed & bits:
            self.ledger.refuse("duplicate")
            return (), []
        self.ledger.live[handoff_id] = replace(
            record,
            state=self._after(record, _E.RECEIVE),
            claimed=(
                *record.claimed[: span.layer],
                claimed | bits,
                *record.claimed[span.layer + 1 :],
            ),
            num_writes=record.num_writes + 1,
            num_frames=record.num_frames + 1,
            num_bytes=record.num_bytes + span.num_blocks * self._layout.region_bytes,
            heard_s=now,
            progress_s=now,
        )
        return record.block_table[span.first_block : end], []

    def damaged(self, peer: str, handoff_id: bytes, reason: str, now: float) -> list[Action]:
        """A data frame cannot be what the source read: its handoff fails, no other is touched."""
        record = self._writable(peer, handoff_id)
        if record is None:
            return []
        self.ledger.refuse("damaged")
        return self._stop(record, _E.FAIL, reason, now)

    def _writable(self, peer: str, handoff_id: bytes) -> TargetRecord | None:
        """The handoff that a data frame of ``peer`` may write for. None: refused and counted."""
        record = self.ledger.live.get(handoff_id)
        if record is None:
            known = handoff_id in self.ledger.tombstones
            self.ledger.refuse("late" if known else "unknown")
        elif record.peer != peer:
            self.ledger.refuse("foreign")
        elif record.state in (_S.RESERVED, _S.RECEIVING):
            return record
        else:
            self.ledger.refuse("late" if record.stopped else "unexpected")
        return None

    def end_write(self, handoff_id: bytes, now: float) -> list[Action]:
        """The bytes of a frame begun by ``begin_write`` are in the blocks."""
        record = self.ledger.live[handoff_id]
        return self._settle(replace(record, num_writes=record.num_writes - 1), now)

    # Frames

    def on_frame(self, peer: str, frame: Frame, now: float) -> list[Action]:
        """A control frame came over ``peer``."""
        if isinstance(frame, Renew):
            return list(self.ledger.renew(peer, frame, now))
        record = self.ledger.live.get(frame.handoff_id)
        if record is None:
            return self._on_unknown(peer, frame, now)
        if record.peer is None and isinstance(frame, Offer) and not record.stopped:
            return self._pair(replace(record, peer=peer, offer=frame, heard_s=now), now)
        if record.peer is None and isinstance(frame, Cancel):
            reason = f"cancelled by the source: {frame.reason}"
            return self._stop(record, _E.CANCEL, reason, now)
        if record.peer != peer:
            self.ledger.refuse("foreign")
            return []
        if record.stopped:
            self.ledger.refuse("late")
            return []
        return self._apply(peer, record.heard(now), frame, now)

    def _on_unknown(self, peer: str, frame: HandoffFrame, now: float) -> list[Action]:
        known = frame.handoff_id in self.ledger.tombstones
        if isinstance(frame, Offer) and not known:
            record = TargetRecord(frame.handoff_id, now, now, now, peer=peer, offer=frame)
            self.ledger.open(record)
            return [Changed(record)]
        if isinstance(frame, Cancel) and not known:
            self.ledger.bury(frame.handoff_id, _S.CANCELLED, frame.reason, False, now)
            return []
        return list(self.ledger.answer_late(peer, frame))

    def _apply(
        self, peer: str, record: TargetRecord, frame: HandoffFrame, now: float
    ) -> list[Action]:
        answer: list[Action] = []
        match frame:
            case Offer():
                answer += self._answer_again(peer, record)
            case First():
                if record.first is None:
                    return self._settle(replace(record, first=frame), now)
                self.ledger.refuse("duplicate")
            case Sent():
                return self._on_sent(record, frame, now)
            case Cancel(reason=reason):
                return self._stop(record, _E.CANCEL, f"cancelled by the source: {reason}", now)
            case Cancelled():
                return self._stop(record, _E.CANCEL, "cancelled by the source", now)
            case _:
                self.ledger.refuse("unexpected")
        self.ledger.live[record.handoff_id] = record
        return answer

    def _on_sent(self, record: TargetRecord, sent: Sent, now: float) -> list[Action]:
        if record.state not in (_S.RESERVED, _S.RECEIVING):
            self.ledger.refuse("unexpected")
            return []
        if record.sent is not None:
            self.ledger.live[record.handoff_id] = record
            return []
        expected = self._num_missing_blocks(record) * self._layout.block_bytes
        if sent.num_bytes != expected:
            reason = f"the source sent {sent.num_bytes} bytes, {expected} were granted"
            return self._stop(record, _E.FAIL, reason, now)
        first = record.first or sent.first
        return self._settle(replace(record, sent=sent, first=first, progress_s=now), now)

    def _answer_again(self, peer: str, record: TargetRecord) -> list[Action]:
        """The source repeats its OFFER: the answer was lost, or has not been given yet."""
        if record.state in (_S.RESERVED, _S.RECEIVING):
            return [Send(peer, Grant(record.handoff_id, record.num_held_tokens))]
        return [Send(peer, Wait(record.handoff_id))] if record.waiting else []

    # Time

    def tick(self, now: float) -> list[Action]:
        """Time passed: end what is silent, alone or stalled, renew leases."""
        actions: list[Action] = []
        for record in list(self.ledger.live.values()):
            if record.state in TERMINAL or record.stopped:
                continue
            if record.request_id is None and now - record.born_s >= HALF_S:
                actions += self._refuse(record, "no request expects this handoff", now)
            elif (reason := overdue(record, now)) is not None:
                actions += self._stop(record, _E.FAIL, reason, now)
        if now - self._renewed_s >= RENEW_S:
            self._renewed_s = now
            actions += self.ledger.renewals()
        self.ledger.sweep(now)
        return actions

    # Inside

    def _pair(self, record: TargetRecord, now: float) -> list[Action]:
        """Request and offer have met, unless one is still missing."""
        offer = record.offer
        if offer is not None and record.request_id not in (None, offer.request_id):
            return self._refuse(record, "the offer is for another request", now)
        return self._keep(record, now)

    def _num_missing_blocks(self, record: TargetRecord) -> int:
        return len(record.block_table) - self._layout.num_blocks_for(record.num_held_tokens)

    def _settle(self, record: TargetRecord, now: float) -> list[Action]:
        """Take the step that is due without further events: LANDED, or the end of a drain."""
        actions: list[Action] = []
        if record.num_writes == 0:
            if record.state is _S.CANCELLING:
                record = replace(record, state=self._after(record, _E.DRAIN))
                actions += self._say(record, Cancelled(record.handoff_id))
            elif record.sent is not None and self._all_written(record):
                record = replace(record, state=self._after(record, _E.LAND))
                actions += self._say(record, Landed(record.handoff_id))
        return actions + self._keep(record, now)

    def _all_written(self, record: TargetRecord) -> bool:
        if record.state not in (_S.RESERVED, _S.RECEIVING):
            return False
        missing = self._num_missing_blocks(record)
        return all(bits.bit_count() == missing for bits in record.claimed)

    def _refuse(self, record: TargetRecord, reason: str, now: float) -> list[Action]:
        record = replace(record, state=self._after(record, _E.REFUSE), reason=reason, refused=True)
        return self._say(record, Refuse(record.handoff_id, reason)) + self._settle(record, now)

    def _stop(
        self, record: TargetRecord, event: HandoffEvent, reason: str, now: float, tell: bool = True
    ) -> list[Action]:
        """End a handoff otherwise than well, once; the first reason stands."""
        if record.stopped or record.state in TERMINAL:
            return []
        record = replace(record, state=self._after(record, event), reason=reason)
        actions = self._say(record, Cancel(record.handoff_id, reason)) if tell else []
        return actions + self._settle(record, now)

    def _say(self, record: TargetRecord, frame: Frame) -> list[Action]:
        """Send to the source, if it is known yet."""
        return [] if record.peer is None else [Send(record.peer, frame)]

    def _keep(self, record: TargetRecord, now: float) -> list[Action]:
        self.ledger.update(record, now)
        return [Changed(record)]

    def _after(self, record: TargetRecord, event: HandoffEvent) -> HandoffState:
        return advance(Role.TARGET, record.state, event)


def overdue(record: TargetRecord, now: float) -> str | None:
    """Why this handoff has waited too long; None: it has not."""
    if record.offer is None:
        alone_s = now - record.heard_s
        return f"no offer came for {HALF_S:g} s" if alone_s >= HALF_S else None
    if now - record.heard_s >= LEASE_S:
        return f"the source was silent for {LEASE_S:g} s"
    if record.sent is not None and now - record.progress_s >= STALL_S:
        return f"bytes are missing and none came for {STALL_S:g} s"
    return None
