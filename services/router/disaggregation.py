"""Whether prompt and answer of a request run on two instances. Pure; asked by ``placement``.

one    nothing is left to decode after the first token, or hardly anything to compute
one    a burst of prompts: the prefill instances would miss the TTFT objective, a decode
       instance would be earlier, and its chunks keep the others' TPOT objective
two    else, where there are two
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.membership import InstanceView
from services.router.prediction import Demand, predict_here, predict_pair
from services.router.rates import Rates
from services.runtime.settings import PlacementPolicy


@dataclass(frozen=True, slots=True)
class Rules:
    """What the config says about placement."""

    disaggregate_from: int = 0
    """Uncached prompt tokens from which two instances are used."""
    policy: PlacementPolicy = PlacementPolicy.COST
    ttft_slo_s: float = 0.0
    """Objective for the first token; 0: none."""
    tpot_slo_s: float = 0.0
    """Objective for each token of the answers beside; 0: none."""
    max_wait_s: float = math.inf
    """What is predicted to wait longer is refused."""


def should_disaggregate(
    demand: Demand,
    readers: Sequence[InstanceView],
    decoders: Sequence[InstanceView],
    rules: Rules,
    rates: Rates,
) -> bool:
    """Whether to use a reader and a decoder of those."""
    if not readers or not decoders or demand.max_tokens == 1:
        return False
    if min(demand.uncached(view) for view in decoders) < rules.disaggregate_from:
        return False
    return not should_deflect(demand, readers, decoders, rules, rates)


def should_deflect(
    demand: Demand,
    readers: Sequence[InstanceView],
    decoders: Sequence[InstanceView],
    rules: Rules,
    rates: Rates,
) -> bool:
    """Whether a decode instance should read this prompt, although there are readers."""
    if not rules.ttft_slo_s or not rates.are_known:
        return False
    apart_s = min(predict_pair(demand, r, d, rates).ttft_s for r in readers for d in decoders)
    if apart_s <= rules.ttft_slo_s:
        return False
    slack = [view for view in decoders if _keeps_tpot(view, rules, rates)]
    return any(predict_here(demand, view, rates).ttft_s < apart_s for view in slack)


def _keeps_tpot(view: InstanceView, rules: Rules, rates: Rates) -> bool:
    """A step that carries a chunk takes ``max_gap_s`` more."""
    if not rules.tpot_slo_s or not view.num_requests:
        return True
    step_s = rates.step_s(view.num_requests + 1)
    return step_s + view.instance.max_gap_s <= rules.tpot_slo_s
