"""When a request would have its first token and its last, here or there. Pure.

Asked by ``placement`` (which pair is best), ``disaggregation`` (one instance or two) and
``admission`` (is it worth to begin).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.router.membership import InstanceView
from services.router.rates import Rates


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request asks of the instances."""

    num_prompt_tokens: int
    """All that is to be read; of a request that goes on, its output, too."""
    max_tokens: int
    """What may still be written."""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """How much of the prompt each instance has cached, by id; none where it is not named."""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_tokens

    def cached(self, view: InstanceView) -> int:
        """Prompt tokens that need not be computed there: never all, the last one's logits are
        needed."""
        known = self.cached_tokens.get(view.instance.instance_id, 0)
        return max(0, min(known, self.num_prompt_tokens - 1))

    def uncached(self, view: InstanceView) -> int:
        return self.num_prompt_tokens - self.cached(view)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds from now."""

    wait_s: float
    """Until its prompt is begun."""
    ttft_s: float
    tpot_s: float
    num_output_tokens: float

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.tpot_s * self.num_output_tokens


def predict_pair(
    demand: Demand, reader: InstanceView, decoder: InstanceView, rates: Rates
) -> Prediction:
    """The prompt on one instance, the answer on another."""
    wait_s = _wait_s(reader, rates)
    prefill_s = rates.prefill_s(demand.uncached(reader), demand.cached(reader))
    source, target = reader.instance.instance_id, decoder.instance.instance_id
    handoff_s = rates.handoff_s(source, target, demand.uncached(decoder))
    return Prediction(
        wait_s,
        wait_s + prefill_s + handoff_s,
        rates.step_s(decoder.num_requests + 1),
        rates.answer_tokens(demand.max_tokens),
    )


def predict_here(demand: Demand, view: InstanceView, rates: Rates) -> Prediction:
    """Both on one instance: chunks of the prompt share its steps with the decodes there."""
    step_s = rates.step_s(view.num_requests)
    slowed = 1.0
    if view.num_requests and view.instance.max_gap_s > 0:
        slowed += step_s / view.instance.max_gap_s
    wait_s = _wait_s(view, rates) * slowed
    prefill_s = rates.prefill_s(demand.uncached(view), demand.cached(view)) * slowed
    return Prediction(
        wait_s,
        wait_s + prefill_s,
        rates.step_s(view.num_requests + 1),
        rates.answer_tokens(demand.max_tokens),
    )


def _wait_s(view: InstanceView, rates: Rates) -> float:
    return rates.queue_s(view.num_prompts, view.num_prompt_tokens)
