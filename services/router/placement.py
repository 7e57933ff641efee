"""Where a request runs: pure functions over a snapshot. Filter, score, pick.

    filter   who is ready, and holds the whole sequence
    decide   one instance or two (``disaggregation``)
    pick     by the policy that the config names, one function each in ``POLICIES``

Knows nothing of links, clocks or clients. Called by ``attempts`` for every request.
"""

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.router.disaggregation import Rules, should_disaggregate
from services.router.membership import InstanceView, Snapshot
from services.router.prediction import Demand, predict_here, predict_pair
from services.router.rates import Rates
from services.runtime.errors import InvalidArgument, Unavailable
from services.runtime.settings import PlacementPolicy, Role

_PROMPT_TOKENS_SCALE = 2048
"""So many prompt tokens to compute halve an instance's score."""
_FREE_SHARE_WEIGHT = 0.25
"""How much free KV counts against few requests."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The instances of one attempt, by id."""

    decode: str
    prefill: str | None
    """None: the decode instance reads the prompt itself."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy chooses from."""

    demand: Demand
    decoders: Sequence[InstanceView]
    """Not empty."""
    readers: Sequence[InstanceView]
    """Empty: the decode instance reads the prompt."""
    rates: Rates
    turn: int
    """Grows with every request: equally good instances take turns."""


Policy = Callable[[Choice], Placement]


def place(
    demand: Demand,
    snapshot: Snapshot,
    rules: Rules,
    rates: Rates,
    turn: int = 0,
    avoid: frozenset[str] = frozenset(),
) -> Placement:
    """Choose the instances for one request.

    Args:
        turn: a number that grows with every request.
        avoid: ids of instances that are chosen only where there are no others.

    Raises:
        Unavailable: nobody can take it now.
        InvalidArgument: nobody here could ever take it.
    """
    if avoid:
        others = tuple(v for v in snapshot.instances if v.instance.instance_id not in avoid)
        with contextlib.suppress(Unavailable, InvalidArgument):
            return place(demand, replace(snapshot, instances=others), rules, rates, turn)
    writers = [view for view in snapshot.instances if view.is_ready and view.instance.decodes]
    if not writers:
        raise Unavailable(_nobody(snapshot))
    fitting = [view for view in writers if view.instance.max_tokens >= demand.num_tokens]
    if not fitting:
        largest = max(view.instance.max_tokens for view in writers)
        raise InvalidArgument(
            "", f"{demand.num_tokens} tokens do not fit: the largest instance holds {largest}"
        )
    decoders = [view for view in fitting if view.instance.role is Role.DECODE]
    readers = [
        view
        for view in snapshot.instances
        if view.is_ready
        and view.instance.role is Role.PREFILL
        and view.instance.max_tokens > demand.num_prompt_tokens
    ]
    if should_disaggregate(demand, readers, decoders, rules, rates):
        return POLICIES[rules.policy](Choice(demand, decoders, readers, rates, turn))
    return POLICIES[rules.policy](Choice(demand, fitting, (), rates, turn))


# ---- policies -------------------------------------------------------------------------------


def at_random(choice: Choice) -> Placement:
    """Anybody; repeatable, and the two legs are drawn independently."""

    def draw(leg: str, views: Sequence[InstanceView]) -> str:
        drawn = random.Random(f"{leg}/{choice.turn}").randrange(len(views))
        return views[drawn].instance.instance_id

    prefill = draw("prefill", choice.readers) if choice.readers else None
    return Placement(draw("decode", choice.decoders), prefill)


def round_robin(choice: Choice) -> Placement:
    """Whose turn it is."""

    def next_of(views: Sequence[InstanceView]) -> str:
        return views[choice.turn % len(views)].instance.instance_id

    prefill = next_of(choice.readers) if choice.readers else None
    return Placement(next_of(choice.decoders), prefill)


def least_loaded(choice: Choice) -> Placement:
    """Each leg where least is to do."""
    return _best_of_each(choice, lambda view: score_prefill(view, 0))


def local_prefix(choice: Choice) -> Placement:
    """The prompt where least of it, and of what waits before it, is left to compute."""
    return _best_of_each(choice, lambda view: score_prefill(view, choice.demand.uncached(view)))


def cost(choice: Choice) -> Placement:
    """The pair that is predicted to finish first: queue, prefill of what is not cached, handoff
    of what the decode instance lacks, then as many steps as answers have."""
    demand, rates = choice.demand, choice.rates
    if not rates.are_known:
        return local_prefix(choice)
    if not choice.readers:
        here = [predict_here(demand, view, rates).total_s for view in choice.decoders]
        return Placement(_pick(choice.decoders, [-total for total in here], choice.turn), None)
    pairs = [(reader, decoder) for reader in choice.readers for decoder in choice.decoders]
    totals = [predict_pair(demand, *pair, rates).total_s for pair in pairs]
    best = min(totals)
    tied = [pair for pair, total in zip(pairs, totals, strict=True) if total == best]
    reader, decoder = tied[choice.turn % len(tied)]
    return Placement(decoder.instance.instance_id, reader.instance.instance_id)


POLICIES: Mapping[PlacementPolicy, Policy] = {
    PlacementPolicy.RANDOM: at_random,
    PlacementPolicy.ROUND_ROBIN: round_robin,
    PlacementPolicy.LEAST_LOADED: least_loaded,
    PlacementPolicy.LOCAL_PREFIX: local_prefix,
    PlacementPolicy.COST: cost,
}


BY_PREFIX = frozenset({PlacementPolicy.LOCAL_PREFIX, PlacementPolicy.COST})
"""Those that want to know what is cached."""


def score_prefill(view: InstanceView, num_tokens: int) -> float:
    """0 to 1: fewer prompt tokens to compute are better, those that wait and ``num_tokens``."""
    waiting = view.num_prompt_tokens + num_tokens
    return _PROMPT_TOKENS_SCALE / (_PROMPT_TOKENS_SCALE + waiting)


def score_decode(view: InstanceView) -> float:
    """0 to 1: fewer requests and more free KV are better."""
    load = view.load
    free = (load.blocks_free + load.blocks_cached) / load.blocks_total if load.blocks_total else 1
    few = 1 / (1 + view.num_requests)
    return few * (1 - _FREE_SHARE_WEIGHT) + free * _FREE_SHARE_WEIGHT


def _best_of_each(choice: Choice, reading: Callable[[InstanceView], float]) -> Placement:
    """The best reader by ``reading``; the best decoder by its load, and by ``reading`` where it
    reads the prompt, too."""
    if choice.readers:
        prefill = _pick(choice.readers, [reading(view) for view in choice.readers], choice.turn)
        scores = [score_decode(view) for view in choice.decoders]
        return Placement(_pick(choice.decoders, scores, choice.turn), prefill)
    scores = [score_decode(view) * reading(view) for view in choice.decoders]
    return Placement(_pick(choice.decoders, scores, choice.turn), None)


def _pick(views: Sequence[InstanceView], scores: Sequence[float], turn: int) -> str:
    """The id of the best; of equally good ones, the one whose turn it is."""
    best = max(scores)
    tied = [view for view, score in zip(views, scores, strict=True) if score == best]
    return tied[turn % len(tied)].instance.instance_id


def _nobody(snapshot: Snapshot) -> str:
    if not snapshot.was_ready:
        return "no decode instance is ready yet: the cluster is starting, try again"
    if any(view.instance.decodes for view in snapshot.instances):
        return "no decode instance is ready: those there are start or drain, try again"
    return "no decode instance is ready: the last one has gone, try again once one is back"
