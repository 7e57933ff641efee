"""What is measured of handoffs: one handoff's times, and an endpoint's totals. No clock here."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LayerSend:
    """Blocks of one layer that left in one message; seconds since the grant."""

    layer: int
    written_s: float
    """When the layer's latest chunk was written."""
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """One handoff that was released, as its source saw it."""

    num_bytes: int
    num_frames: int
    num_held_tokens: int
    """Prompt tokens that the target had already."""
    grant_s: float
    """OFFER -> GRANT."""
    transfer_s: float
    """Time in which bytes were on their way."""
    hidden_s: float
    """Of that, how much passed while prefill was still computing."""
    sends: tuple["LayerSend", ...] = ()
    """What left when, in order."""

    @property
    def hidden_ratio(self) -> float:
        """Share of the transfer that cost no time of its own; 1 when nothing had to move."""
        return self.hidden_s / self.transfer_s if self.transfer_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class EndpointStats:
    """Totals of a source or a target since it started."""

    handoffs_active: int
    num_bytes: int
    outcomes: dict[str, int] = field(default_factory=dict)
    """released | landed | refused | cancelled | failed -> handoffs."""
    refused_frames: dict[str, int] = field(default_factory=dict)
    """unknown | foreign | late | duplicate | unexpected | damaged -> frames."""


def layer_lags(sends: tuple[LayerSend, ...]) -> dict[int, float]:
    """Of each layer, seconds from its last chunk's being written to its last bytes' being sent."""
    return {each.layer: max(0.0, each.end_s - each.written_s) for each in sends}


class BusyTime:
    """Intervals in which something was busy, their union, and the part before a moment."""

    def __init__(self) -> None:
        self._intervals: list[tuple[float, float]] = []

    def add(self, begin_s: float, end_s: float) -> None:
        """Busy from ``begin_s`` to ``end_s``; intervals come roughly in order."""
        while self._intervals and begin_s <= self._intervals[-1][1]:
            first, last = self._intervals.pop()
            begin_s, end_s = min(first, begin_s), max(last, end_s)
        self._intervals.append((begin_s, end_s))

    def total_s(self) -> float:
        """Seconds busy."""
        return sum(end - begin for begin, end in self._intervals)

    def before_s(self, moment_s: float) -> float:
        """Seconds busy before ``moment_s``."""
        return sum(max(0.0, min(end, moment_s) - begin) for begin, end in self._intervals)
