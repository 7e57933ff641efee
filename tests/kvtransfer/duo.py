"""A source's and a target's machine beside each other, and a clock in hand."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.handoff.frames import First, Frame, Offer, Send, Span
from kvtransfer.handoff.source import SourceMachine
from kvtransfer.handoff.table import HandoffState
from kvtransfer.handoff.target import TargetMachine
from kvtransfer.layout import KvLayout

LAYOUT = KvLayout("float32", num_layers=2, num_kv_heads=1, head_dim=1, block_size=4)
ID, OTHER = b"a" * 16, b"b" * 16
S = "source-process"
TOKENS = 9  # three blocks


@dataclass
class Duo:
    """Both machines and the time. What they say is kept, and delivered only when asked."""

    source: SourceMachine = field(default_factory=lambda: SourceMachine(LAYOUT))
    target: TargetMachine = field(default_factory=lambda: TargetMachine(LAYOUT))
    now: float = 0.0
    records: dict[tuple[str, bytes], Any] = field(default_factory=dict)

    def take(self, side: str, actions: list[Any]) -> list[Frame]:
        """Keep the records, return the frames."""
        for action in actions:
            if not isinstance(action, Send):
                self.records[side, action.record.handoff_id] = action.record
        return [action.frame for action in actions if isinstance(action, Send)]

    def to_source(self, *heard: Frame, peer: str = S) -> list[Frame]:
        said = (self.take("source", self.source.on_frame(peer, f, self.now)) for f in heard)
        return [frame for frames in said for frame in frames]

    def to_target(self, *heard: Frame, peer: str = S) -> list[Frame]:
        said = (self.take("target", self.target.on_frame(peer, f, self.now)) for f in heard)
        return [frame for frames in said for frame in frames]

    def tick(self, seconds: float) -> tuple[list[Frame], list[Frame]]:
        """Time passes on both sides; what each says."""
        self.now += seconds
        return (
            self.take("source", self.source.tick(self.now)),
            self.take("target", self.target.tick(self.now)),
        )

    def state(self, side: str, handoff_id: bytes = ID) -> HandoffState:
        return self.records[side, handoff_id].state  # type: ignore[no-any-return]

    def reason(self, side: str) -> str:
        return self.records[side, ID].reason  # type: ignore[no-any-return]

    def offered(self, handoff_id: bytes = ID) -> None:
        """Offer and request have met."""
        offer = Offer(handoff_id, "r", TOKENS)
        heard = self.take("source", self.source.offer(S, offer, self.now))
        self.take("target", self.target.expect(handoff_id, "r", self.now))
        self.to_target(*heard)

    def granted(self, held: int = 0) -> None:
        """The source may send."""
        self.offered()
        self.to_source(*self.take("target", self.target.grant(ID, (7, 8, 9), held, self.now)))

    def send(self, *, deliver: bool = True, blocks: int = 8) -> None:
        """Everything is read, and unless told otherwise written."""
        while (span := self.source.next_read(ID, [TOKENS] * 2, blocks)) is not None:
            self.take("source", self.source.end_read(ID, self.now))
            if deliver:
                assert self.write(span)

    def write(self, span: Span, peer: str = S) -> tuple[int, ...]:
        ids, actions = self.target.begin_write(peer, ID, span, self.now)
        self.take("target", actions)
        if ids:
            self.take("target", self.target.end_write(ID, self.now))
        return ids

    def finish(self) -> list[Frame]:
        """The first token is known: FIRST, SENT."""
        return self.take("source", self.source.set_first(First(ID, TOKENS, 3), self.now))

    @property
    def refused(self) -> Counter[str]:
        return self.source.ledger.refused_frames + self.target.ledger.refused_frames
