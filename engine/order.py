"""Who goes first: the scheduler's policy as pure functions. No state, no blocks, no clock.

``decode_first``: every step carries all sequences that decode, prefill chunks fill the rest.
``prefill_first``: chunks alone while prompts wait, but only so many steps; then all decodes.
Order is first come, first served within a priority, with aging. Called by ``composer`` and
``roster``.
"""

from collections.abc import Iterable
from enum import Enum, StrEnum, auto

PRIORITY_STEP_S = 10.0
"""One level of priority is worth having arrived this much earlier."""
MAX_PRIORITY = 30
"""Priorities beyond +-30 count as +-30, so nobody waits behind more than ten minutes of others."""

Rank = tuple[float, int]


class Schedule(StrEnum):
    """Who goes first."""

    DECODE_FIRST = "decode_first"
    PREFILL_FIRST = "prefill_first"


class Turn(Enum):
    """Whose step the next one is."""

    BOTH = auto()
    PREFILLS = auto()  # a step without a chunk is the decodes' after all
    DECODES = auto()


def next_turn(
    schedule: Schedule, num_decodes: int, num_prefill_steps: int, max_prefill_steps: int
) -> Turn:
    """Whose step comes next.

    Args:
        num_prefill_steps: steps of prompts alone since the last that carried decodes.
    """
    if schedule is Schedule.DECODE_FIRST:
        return Turn.BOTH
    waited_enough = num_decodes > 0 and num_prefill_steps >= max_prefill_steps
    return Turn.DECODES if waited_enough else Turn.PREFILLS


def rank(priority: int, arrival_s: float, number: int) -> Rank:
    """Sort key; the smallest goes first.

    A waiting sequence ages: its priority falls by one every ``PRIORITY_STEP_S``. All age alike,
    so comparing ``priority - waited_s / PRIORITY_STEP_S`` at any moment is comparing
    ``arrival_s + priority * PRIORITY_STEP_S``, which never changes. Nobody starves: who arrives
    later than that difference cannot overtake.

    Args:
        number: of the arrival; breaks ties.
    """
    clamped = max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))
    return arrival_s + clamped * PRIORITY_STEP_S, number


def prefill_room(
    num_decodes: int, token_budget: int, prefill_limit_tokens: int, block_size: int
) -> int:
    """Prefill tokens a step has room for beside its decode tokens.

    At least one block, however small the limit: a prompt must get on. The scheduler refuses
    configurations in which the budget has no room for that.
    """
    return max(block_size, min(token_budget - num_decodes, prefill_limit_tokens))


def chunk_ends(spans: Iterable[tuple[int, int]], room_tokens: int, block_size: int) -> list[int]:
    """Where this step's chunk of each prefill ends; its start, where there is none.

    Earlier spans are served first. A chunk ends at a block's end or at the end of its span.

    Args:
        spans: (computed tokens, tokens in all) of each prefill, in order.
        room_tokens: at least ``block_size``.
    """
    ends = []
    for start, stop in spans:
        end = start + room_tokens
        end = stop if end >= stop else max(start, end // block_size * block_size)
        room_tokens -= end - start
        ends.append(end)
    return ends
