"""How many answers a client asks for, how many are written for them, and whether by beam search.

Knows nothing of prompts or of single tokens. Used by ``sampling``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.request import BeamSearch
from services.runtime.errors import InvalidArgument

MAX_ANSWERS = 16
"""Written to one prompt, whether told or not."""
MIN_WIDTH = 2
"""One beam would be greedy decoding."""
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True, slots=True)
class RawBeamSearch:
    """As the client sent it; None: unset."""

    width: int | None = None
    """Unset: as many as are asked for."""
    length_penalty: float | None = None
    early_stopping: bool = False


class Asks(Protocol):
    """What of a client's sampling matters here."""

    @property
    def n(self) -> int | None: ...
    @property
    def best_of(self) -> int | None: ...
    @property
    def beam_search(self) -> RawBeamSearch | None: ...


@dataclass(frozen=True, slots=True)
class Several:
    """Checked."""

    n: int
    best_of: int
    beam_search: BeamSearch | None


def parse_several(given: Asks, spelled: Callable[[str], str]) -> Several:
    """
    Args:
        spelled: how the client calls a field.

    Raises:
        InvalidArgument: names the field.
    """
    n = 1 if given.n is None else given.n
    if not 1 <= n <= MAX_ANSWERS:
        raise InvalidArgument(spelled("n"), f"{n} is not in 1 to {MAX_ANSWERS}")
    best_of = n if given.best_of is None else given.best_of
    if not n <= best_of <= MAX_ANSWERS:
        raise InvalidArgument(spelled("best_of"), f"{best_of} is not in n = {n} to {MAX_ANSWERS}")
    if given.beam_search is None:
        return Several(n, best_of, None)
    search = given.beam_search
    width = best_of if search.width is None else search.width
    low = max(MIN_WIDTH, best_of)
    if not low <= width <= MAX_ANSWERS:
        raise InvalidArgument(
            spelled("beam_search.width"),
            f"{width} is not in {low} to {MAX_ANSWERS} (n and best_of ask for {best_of})",
        )
    penalty = 1.0 if search.length_penalty is None else search.length_penalty
    if not math.fabs(penalty) <= MAX_LENGTH_PENALTY:  # also refuses NaN
        raise InvalidArgument(
            spelled("beam_search.length_penalty"),
            f"{penalty:g} is not in -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}",
        )
    return Several(n, n, BeamSearch(width, penalty, search.early_stopping))
