"""What each end of a handoff remembers of it: immutable, replaced at every event.

Written by ``handoff.source`` and ``handoff.target``; read by the shells and by the exploration.
"""

from dataclasses import dataclass, replace
from typing import Self

from kvtransfer.handoff.frames import First, Offer, Sent
from kvtransfer.handoff.table import STOPPED, TERMINAL, HandoffState


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """One handoff at its source."""

    peer: str
    """The connection it goes over: new with every connect, so an old one's frames are foreign."""
    offer: Offer
    heard_s: float
    asked_s: float
    """When the OFFER or SENT that awaits an answer was last said."""
    state: HandoffState = HandoffState.OFFERED
    num_held_tokens: int = 0
    """The target has these already; set by the grant."""
    cursors: tuple[int, ...] = ()
    """Per layer the next logical block to read; set by the grant."""
    first: First | None = None
    num_reads: int = 0
    """Frames being read from the blocks right now."""
    num_frames: int = 0
    num_bytes: int = 0
    reason: str = ""
    refused: bool = False

    @property
    def handoff_id(self) -> bytes:
        return self.offer.handoff_id

    @property
    def stopped(self) -> bool:
        """It ended, or is ending, otherwise than well."""
        return self.state in STOPPED

    @property
    def drained(self) -> bool:
        """Its blocks will not be read any more: they may be freed."""
        return self.state in TERMINAL and self.num_reads == 0

    def heard(self, now: float) -> Self:
        """The target lives, and believes in it."""
        return replace(self, heard_s=now)


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """One handoff at its target."""

    handoff_id: bytes
    born_s: float
    heard_s: float
    progress_s: float
    """When bytes last landed."""
    request_id: str | None = None
    """The request that expects it; None: only the offer is here."""
    peer: str | None = None
    """The connection the offer came over; None: only the request is here."""
    offer: Offer | None = None
    state: HandoffState = HandoffState.EXPECTED
    waiting: bool = False
    """The source was told to wait."""
    num_held_tokens: int = 0
    block_table: tuple[int, ...] = ()
    """Blocks of the whole prompt, held ones included; set by the grant."""
    claimed: tuple[int, ...] = ()
    """Per layer the bits of logical blocks that are written or being written."""
    num_writes: int = 0
    """Frames being written into the blocks right now."""
    first: First | None = None
    sent: Sent | None = None
    num_frames: int = 0
    num_bytes: int = 0
    reason: str = ""
    refused: bool = False

    @property
    def stopped(self) -> bool:
        """It ended, or is ending, otherwise than well."""
        return self.state in STOPPED

    @property
    def drained(self) -> bool:
        """Its blocks will not be written any more."""
        return self.state in TERMINAL and self.num_writes == 0

    def heard(self, now: float) -> Self:
        """The source lives, and believes in it."""
        return replace(self, heard_s=now)
