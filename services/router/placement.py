"""Where a request runs: pure functions over a snapshot. Filter, score in [0, 1], pick.

Knows nothing of links, clocks or clients. Called by ``serving`` for every request.
"""

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.router.membership import InstanceView, Snapshot
from services.runtime.errors import InvalidArgument, Unavailable
from services.runtime.settings import PlacementPolicy, Role

Score = Callable[[InstanceView], float]

_PROMPT_TOKENS_SCALE = 2048
"""So many waiting prompt tokens halve a prefill instance's score."""
_FREE_SHARE_WEIGHT = 0.25
"""How much free KV counts against few requests."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The instances of one attempt, by id."""

    decode: str
    prefill: str | None
    """None: the decode instance reads the prompt itself."""


def place(
    num_prompt_tokens: int,
    max_tokens: int,
    snapshot: Snapshot,
    disaggregate_from: int,
    turn: int = 0,
    avoid: frozenset[str] = frozenset(),
    policy: PlacementPolicy = PlacementPolicy.LEAST_LOADED,
) -> Placement:
    """Choose the instances for one request.

    Args:
        num_prompt_tokens: all that is to be read; of a request that goes on, its output, too.
        max_tokens: what may still be written.
        avoid: ids of instances that are chosen only where there are no others.
        turn: a number that grows with every request: equally good instances take turns.
        policy: how one is picked of those that may take it.

    Raises:
        Unavailable: nobody can take it now.
        InvalidArgument: nobody here could ever take it.
    """
    if avoid:
        others = tuple(v for v in snapshot.instances if v.instance.instance_id not in avoid)
        with contextlib.suppress(Unavailable, InvalidArgument):
            without = replace(snapshot, instances=others)
            return place(
                num_prompt_tokens, max_tokens, without, disaggregate_from, turn, policy=policy
            )
    num_tokens = num_prompt_tokens + max_tokens
    writers = [view for view in snapshot.instances if view.is_ready and view.instance.decodes]
    if not writers:
        raise Unavailable(_nobody(snapshot))
    fitting = [view for view in writers if view.instance.max_tokens >= num_tokens]
    if not fitting:
        largest = max(view.instance.max_tokens for view in writers)
        raise InvalidArgument(
            "", f"{num_tokens} tokens do not fit: the largest instance holds {largest}"
        )
    if should_disaggregate(num_prompt_tokens, max_tokens, snapshot, disaggregate_from):
        decoders = [view for view in fitting if view.instance.role is Role.DECODE]
        readers = _prefill_instances(num_prompt_tokens, snapshot)
        if decoders:
            decode = pick(decoders, score_decode, turn, policy)
            return Placement(decode, pick(readers, score_prefill, turn, policy))
    return Placement(pick(fitting, score_decode, turn, policy), None)


def should_disaggregate(
    num_prompt_tokens: int, max_tokens: int, snapshot: Snapshot, disaggregate_from: int
) -> bool:
    """Whether prompt and answer of a request should run on two instances."""
    if max_tokens == 1 or num_prompt_tokens < disaggregate_from:
        return False
    has_decode = any(
        view.is_ready and view.instance.role is Role.DECODE for view in snapshot.instances
    )
    return has_decode and bool(_prefill_instances(num_prompt_tokens, snapshot))


def score_prefill(view: InstanceView) -> float:
    """1 is idle; fewer prompt tokens to read are better."""
    return _PROMPT_TOKENS_SCALE / (_PROMPT_TOKENS_SCALE + view.pending.num_prompt_tokens)


def score_decode(view: InstanceView) -> float:
    """1 is idle and empty; fewer requests and more free KV are better."""
    load = view.load
    free = (load.blocks_free + load.blocks_cached) / load.blocks_total if load.blocks_total else 1
    few = 1 / (1 + view.pending.num_requests)
    return few * (1 - _FREE_SHARE_WEIGHT) + free * _FREE_SHARE_WEIGHT


def pick(
    views: Sequence[InstanceView],
    score: Score,
    turn: int,
    policy: PlacementPolicy = PlacementPolicy.LEAST_LOADED,
) -> str:
    """The id of one of ``views``, which must not be empty.

    ``random`` and ``round_robin`` do not look at the score. ``least_loaded`` takes the best; of
    equally good ones, the one whose turn it is.
    """
    if policy is PlacementPolicy.RANDOM:
        # Seeded by turn and score: repeatable, and the two legs are drawn independently.
        drawn = random.Random(f"{score.__name__}/{turn}").randrange(len(views))
        return views[drawn].instance.instance_id
    if policy is PlacementPolicy.ROUND_ROBIN:
        return views[turn % len(views)].instance.instance_id
    scores = [score(view) for view in views]
    best = max(scores)
    tied = [view for view, each in zip(views, scores, strict=True) if each == best]
    return tied[turn % len(tied)].instance.instance_id


def _prefill_instances(num_prompt_tokens: int, snapshot: Snapshot) -> list[InstanceView]:
    return [
        view
        for view in snapshot.instances
        if view.is_ready
        and view.instance.role is Role.PREFILL
        and view.instance.max_tokens > num_prompt_tokens
    ]


def _nobody(snapshot: Snapshot) -> str:
    if not snapshot.was_ready:
        return "no decode instance is ready yet: the cluster is starting, try again"
    if any(view.instance.decodes for view in snapshot.instances):
        return "no decode instance is ready: those there are start or drain, try again"
    return "no decode instance is ready: the last one has gone, try again once one is back"
