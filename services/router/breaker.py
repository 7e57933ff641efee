"""Which instances fail again and again: a circuit breaker for each (Nygard, "Release It!", 2007).

An instance that fails what is placed on it looks idle, so without this everything would be placed
on it. After some failures in a row it is kept away from for a while; the first request after that
is a probe: one more failure, and the while is twice as long; a success, and all is forgotten. A
request has two legs and cannot always tell which one failed: both are counted, and the innocent
one is cleared by its next success. Keeping away is no ban: where there is nobody else, an open
instance is used.

Pure: times are passed in. Used by ``attempts``.
"""

from collections.abc import Iterable
from dataclasses import dataclass

FAILURES_IN_A_ROW = 3
FIRST_OPEN_S = 2.0
MAX_OPEN_S = 30.0


@dataclass(frozen=True, slots=True)
class _Trouble:
    num_failures: int = 0
    open_until_s: float = 0.0

    def after_failure(self, now_s: float) -> "_Trouble":
        failures = self.num_failures + 1
        if failures < FAILURES_IN_A_ROW:
            return _Trouble(failures)
        if now_s < self.open_until_s:
            return self  # of a request that was there before it opened
        open_s = min(MAX_OPEN_S, FIRST_OPEN_S * 2.0 ** (failures - FAILURES_IN_A_ROW))
        return _Trouble(failures, now_s + open_s)


class Breakers:
    """The breakers of one router, by instance id."""

    def __init__(self) -> None:
        self._troubled: dict[str, _Trouble] = {}

    def failed(self, instance_ids: Iterable[str], now_s: float) -> None:
        """A leg of an attempt failed and these, its instances, live."""
        for instance_id in instance_ids:
            before = self._troubled.get(instance_id, _Trouble())
            self._troubled[instance_id] = before.after_failure(now_s)

    def succeeded(self, instance_ids: Iterable[str]) -> None:
        """They answered a request."""
        for instance_id in instance_ids:
            self._troubled.pop(instance_id, None)

    def open(self, now_s: float) -> frozenset[str]:
        """The instances to keep away from."""
        return frozenset(i for i, each in self._troubled.items() if now_s < each.open_until_s)

    def keep_only(self, instance_ids: Iterable[str]) -> None:
        """Forget all others: they have left, and come back under another id."""
        here = set(instance_ids)
        self._troubled = {i: each for i, each in self._troubled.items() if i in here}
