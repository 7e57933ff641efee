"""Whether a request goes on after an attempt has failed. Pure: no clock, no network.

    the client is wrong, or has gone    no: it is told
    an instance died                    yes, where there is a sign of life since; but not a second
                                        time in a row with hardly a token between: then it may be
                                        the request that kills
    a leg failed, its instance lives    yes; elsewhere where there is another place
    too often, or for too long          no: the last reason is told

Called by ``serving`` between two attempts.
"""

from dataclasses import dataclass, field, replace

from services.runtime.errors import Internal, ServiceError, Unavailable

MAX_ATTEMPTS = 4
MAX_DEATHS = 2
PROGRESS_TOKENS = 16
"""An attempt that wrote so many tokens got on: what happened before it no longer counts."""
HEAL_S = 10.0
"""How long a request that does not get on is tried."""
PROOF_S = 0.5
"""After a death, how long to wait for a sign of life of the others: two heartbeats. What ends one
instance, its machine or its network, often ends others, which nobody has noticed yet."""
CAPACITY_S = 0.8
"""How long to wait for an instance where none is left, before the client is told."""

_CURABLE = (Unavailable, Internal)


class LegFailure(Exception):
    """How an attempt failed.

    Args:
        died: an instance is gone, and nobody had asked it to go.
        living: the instances that were part of it and are still there.
    """

    def __init__(self, error: ServiceError, died: bool, living: frozenset[str]) -> None:
        super().__init__(str(error))
        self.error = error
        self.died = died
        self.living = living


@dataclass(frozen=True, slots=True)
class History:
    """What has happened to one request since it last got on."""

    num_attempts: int = 0
    num_deaths: int = 0
    failing_since_s: float | None = None
    avoid: frozenset[str] = field(default_factory=frozenset)
    """Instances to keep away from, as long as there are others."""

    def after(self, failure: LegFailure, num_new_tokens: int, now_s: float) -> "History":
        """The history with one more failed attempt, which wrote ``num_new_tokens``."""
        before = History() if num_new_tokens >= PROGRESS_TOKENS else self
        since_s = before.failing_since_s
        return replace(
            before,
            num_attempts=before.num_attempts + 1,
            num_deaths=before.num_deaths + failure.died,
            failing_since_s=now_s if since_s is None else since_s,
            avoid=before.avoid if failure.died else before.avoid | failure.living,
        )


def is_curable(error: ServiceError) -> bool:
    """Whether something is wrong with an instance, not with the request."""
    return isinstance(error, _CURABLE)


def verdict(history: History, failure: LegFailure, now_s: float) -> ServiceError | None:
    """What the client is told; None: the request goes on.

    Args:
        history: with ``failure`` in it.
    """
    error = failure.error
    if not is_curable(error):
        return error
    if history.num_deaths >= MAX_DEATHS:
        return Internal(
            f"{history.num_deaths} instances died while they served this request, "
            f"so it is not tried again: {error}"
        )
    assert history.failing_since_s is not None
    if history.num_attempts >= MAX_ATTEMPTS or now_s - history.failing_since_s >= HEAL_S:
        return Unavailable(f"{history.num_attempts} attempts failed, the last one because: {error}")
    return None
