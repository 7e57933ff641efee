"""How fast the instances are, learned from the requests they answered. No number is set by hand.

    prefill   seconds = a * tokens + b * (pairs that attend), by least squares (weights, attention)
    step      seconds = a + b * requests in the batch, by least squares
    handoff   seconds a token that were not hidden behind prefill, by pair of instances
    answer    tokens of an answer

The newest requests weigh most. Until each has been seen ``ENOUGH`` times nothing is known, and
placement counts tokens instead. Pure: times are passed in. Fed and asked by ``attempts``.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

ENOUGH = 4
_KEEP = 0.97
"""What an observation still weighs after the next one."""
_RIDGE = 1e-6
"""Keeps the fit defined while all observations are alike."""


@dataclass(slots=True)
class _Line:
    """y = a * u + b * v with a, b >= 0, by least squares with exponential forgetting."""

    uu: float = 0.0
    uv: float = 0.0
    vv: float = 0.0
    uy: float = 0.0
    vy: float = 0.0
    num_seen: int = 0

    def observe(self, u: float, v: float, y: float) -> None:
        self.uu = _KEEP * self.uu + u * u
        self.uv = _KEEP * self.uv + u * v
        self.vv = _KEEP * self.vv + v * v
        self.uy = _KEEP * self.uy + u * y
        self.vy = _KEEP * self.vy + v * y
        self.num_seen += 1

    def at(self, u: float, v: float) -> float:
        """A factor that would come out negative is 0, and the other is fitted alone."""
        uu, vv = self.uu * (1 + _RIDGE), self.vv * (1 + _RIDGE)
        determinant = uu * vv - self.uv * self.uv
        if determinant > 0:
            a = (self.uy * vv - self.vy * self.uv) / determinant
            b = (self.vy * uu - self.uy * self.uv) / determinant
            if a >= 0 and b >= 0:
                return a * u + b * v
            if b >= 0:
                return self.vy / vv * v
        return self.uy / uu * u if uu else 0.0


@dataclass(slots=True)
class _Mean:
    """An exponential moving average."""

    value: float = 0.0
    num_seen: int = 0

    def observe(self, value: float) -> None:
        self.num_seen += 1
        weight = max(1 - _KEEP, 1 / self.num_seen)
        self.value += weight * (value - self.value)


@dataclass(slots=True)
class Rates:
    """What has been learned."""

    _prefill: _Line = field(default_factory=_Line)
    _step: _Line = field(default_factory=_Line)
    _handoff: dict[tuple[str, str], _Mean] = field(default_factory=dict)
    _any_handoff: _Mean = field(default_factory=_Mean)
    _answer: _Mean = field(default_factory=_Mean)

    @property
    def are_known(self) -> bool:
        """Whether times can be predicted."""
        return min(self._prefill.num_seen, self._step.num_seen) >= ENOUGH

    def prefill_s(self, num_tokens: float, num_cached: float = 0) -> float:
        """To compute ``num_tokens`` of a prompt after ``num_cached`` that are there."""
        return self._prefill.at(num_tokens, _pairs(num_tokens, num_cached))

    def queue_s(self, num_requests: int, num_tokens: int) -> float:
        """To compute ``num_tokens`` of as many prompts, one after the other."""
        each = num_tokens / max(1, num_requests)
        return max(1, num_requests) * self.prefill_s(each)

    def step_s(self, num_requests: int) -> float:
        """One decode step with so many in the batch."""
        return self._step.at(1, num_requests)

    def handoff_s(self, source: str, target: str, num_tokens: int) -> float:
        """What a handoff of ``num_tokens`` adds to prefill."""
        mean = self._handoff.get((source, target), self._any_handoff)
        return mean.value * num_tokens

    def answer_tokens(self, max_tokens: int) -> float:
        """What an answer is expected to have."""
        return min(max_tokens, self._answer.value)

    def saw_prefill(self, num_tokens: int, num_cached: int, elapsed_s: float) -> None:
        """A prompt was computed; ``num_tokens`` of it, after ``num_cached``. Of prompts that were
        computed together the first has all of the time, and the others none."""
        if num_tokens > 0:
            self._prefill.observe(num_tokens, _pairs(num_tokens, num_cached), elapsed_s)

    def saw_decode(self, num_requests: int, num_tokens: int, tpot_s: float) -> None:
        """An answer was written, in a batch of about ``num_requests``."""
        self._answer.observe(num_tokens)
        if tpot_s > 0:
            self._step.observe(1, num_requests, tpot_s)

    def saw_handoff(self, source: str, target: str, num_tokens: int, exposed_s: float) -> None:
        """KV of ``num_tokens`` landed ``exposed_s`` after its prefill."""
        if num_tokens > 0:
            self._any_handoff.observe(exposed_s / num_tokens)
            self._handoff.setdefault((source, target), _Mean()).observe(exposed_s / num_tokens)

    def keep_only(self, instance_ids: Iterable[str]) -> None:
        """Forget pairs of instances that have left."""
        here = set(instance_ids)
        self._handoff = {
            pair: mean for pair, mean in self._handoff.items() if here.issuperset(pair)
        }


def _pairs(num_tokens: float, num_cached: float) -> float:
    """Pairs of positions that causal attention multiplies."""
    return num_tokens * (num_cached + num_tokens / 2)
