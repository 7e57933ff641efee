"""The words two handoff machines exchange, and what they ask of the shell around them.

Plain data. ``wire`` turns control frames into protobuf; ``source`` and ``target`` (the shells)
carry out actions; the exploration in the tests reads both.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

HANDOFF_ID_BYTES = 16
LEASE_S = 5.0
"""A live handoff fails when nothing was heard of it for this long."""
HALF_S = 5.0
"""An offer without its request, or a request without its offer or news of it, fails after this."""
STALL_S = 5.0
"""All is SENT, but bytes are missing and none have come for this long: they are lost."""
RENEW_S = 1.0
"""How often leases are renewed and unanswered OFFER and SENT are repeated."""
TOMBSTONE_S = 30.0
"""How long an ended handoff is remembered; longer than any peer can still believe in it."""
MAX_TOMBSTONES = 65_536


@dataclass(frozen=True, slots=True)
class Offer:
    """Source: here is the KV of ``num_tokens`` prompt tokens."""

    handoff_id: bytes
    request_id: str
    num_tokens: int
    block_hashes: tuple[bytes, ...] = ()
    """Of the prompt's full blocks."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Target: blocks are reserved; send everything after ``num_held_tokens``."""

    handoff_id: bytes
    num_held_tokens: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Target: no blocks now; ask again."""

    handoff_id: bytes


@dataclass(frozen=True, slots=True)
class Refuse:
    """Target: never."""

    handoff_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class First:
    """Source: the first output token, ahead of the KV bytes."""

    handoff_id: bytes
    position: int
    token_id: int
    num_cached_tokens: int = 0
    """Prompt tokens that the source found in its own prefix cache."""
    details: bytes = b""
    """What the services on both sides tell each other with it."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Source: everything is on its way. Repeats FIRST, so that LANDED implies a first token."""

    handoff_id: bytes
    num_frames: int
    num_bytes: int
    first: First


@dataclass(frozen=True, slots=True)
class Landed:
    """Target: everything is here; the source may let go."""

    handoff_id: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """Either: this handoff is over."""

    handoff_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Either: over, and nothing of it will be read or written here any more."""

    handoff_id: bytes


@dataclass(frozen=True, slots=True)
class Renew:
    """Either: these handoffs are alive here."""

    handoff_ids: tuple[bytes, ...]


HandoffFrame = Offer | Grant | Wait | Refuse | First | Sent | Landed | Cancel | Cancelled
Frame = HandoffFrame | Renew


@dataclass(frozen=True, slots=True)
class Span:
    """``num_blocks`` logical blocks of one layer, from ``first_block`` on: one data frame."""

    layer: int
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Send:
    """Action: put ``frame`` on the control stream of ``peer``."""

    peer: str
    frame: Frame


R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Changed(Generic[R_co]):
    """Action: a handoff moved; ``record`` is what it is now."""

    record: R_co
