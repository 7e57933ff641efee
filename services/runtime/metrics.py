"""Prometheus metrics: every name, label and bucket of KVRelay, in two frozen groups.

Each process has one registry of its own. All metrics carry ``model``, ``role`` and ``instance``;
a name is measured in one place only, except requests running and waiting, which ``role`` keeps
apart, so sums over instances never count a thing twice. The router measures what a client sees,
workers what an instance does. Shares of time are not measured but queried: a busy share is the
rate of ``kvrelay_step_seconds_sum``. Knows nothing of where the numbers come from.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from services.runtime.errors import ERROR_CODES

_STEP_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
)
_TOKEN_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)
_WAIT_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_RATIO = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_TOKENS = tuple(2**power for power in range(14))
_LENGTHS = tuple(2**power for power in range(18))

PROMPT_SOURCES = ("local_compute", "local_cache_hit", "handoff")
"""Where a prompt token's KV came from, seen from the instance that needed it."""
BLOCK_STATES = ("free", "cached", "held", "quarantined")
"""Their sum is all blocks."""
HANDOFF_OUTCOMES = ("landed", "cancelled", "failed")
PLACEMENTS = ("apart", "together")
PHASES = ("prefill", "decode")
OUTCOMES = ("stop", "length", "error", *(codes.label for codes in ERROR_CODES.values()))
"""Finish reasons and errors; a request that is aborted ends like one whose client has gone."""


def new_registry() -> CollectorRegistry:
    """A registry with this process's CPU, memory and file descriptors in it."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class _Family:
    """Makes metrics that share model, role and instance."""

    def __init__(self, registry: CollectorRegistry, model: str, role: str, instance: str) -> None:
        self._registry = registry
        self._fixed = {"model": model, "role": role, "instance": instance}

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        names = tuple(self._fixed)
        metric = Histogram(name, text, names, buckets=buckets, registry=self._registry)
        return metric.labels(**self._fixed)

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, tuple(self._fixed), registry=self._registry).labels(
            **self._fixed
        )

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, tuple(self._fixed), registry=self._registry).labels(**self._fixed)

    def counters(
        self, name: str, text: str, label: str, values: tuple[str, ...] = ()
    ) -> Callable[[str], Counter]:
        """One counter for each value of ``label``; ``values`` exist, at zero, from the start."""
        metric = Counter(name, text, (*self._fixed, label), registry=self._registry)

        def child(value: str) -> Counter:
            return metric.labels(**self._fixed, **{label: value})

        for value in values:
            child(value)
        return child

    def gauges(self, name: str, text: str, label: str) -> Callable[[str], Gauge]:
        """One gauge for each value of ``label``."""
        metric = Gauge(name, text, (*self._fixed, label), registry=self._registry)
        return lambda value: metric.labels(**self._fixed, **{label: value})

    def cache_config(self) -> Callable[[int, int], None]:
        """Facts are labels of a gauge that is 1."""
        facts = (*self._fixed, "block_size", "num_blocks")
        metric = Gauge(
            "kvrelay_cache_config_info", "Shape of the KV cache.", facts, registry=self._registry
        )

        def say(block_size: int, num_blocks: int) -> None:
            metric.labels(**self._fixed, block_size=block_size, num_blocks=num_blocks).set(1)

        return say


@dataclass(frozen=True, slots=True)
class RouterMetrics:
    """What clients see, measured at the router."""

    time_to_first_token_seconds: Histogram
    inter_token_latency_seconds: Histogram
    e2e_request_latency_seconds: Histogram
    request_queue_time_seconds: Histogram
    prefill_time_seconds: Histogram
    decode_time_seconds: Histogram
    time_per_output_token_seconds: Histogram
    request_prompt_tokens: Histogram
    request_output_tokens: Histogram
    good_requests_total: Counter
    """Answers that met both objectives; one that is not set is met."""
    objective_seconds: Callable[[str], Gauge]
    """By objective: ttft or tpot; 0: not set."""
    requests_total: Callable[[str], Counter]
    """By outcome: the finish reason, or the label of the error."""
    placements_total: Callable[[str], Counter]
    """Attempts by how prompt and answer were placed: apart or together."""
    retries_total: Counter
    """Attempts that failed and were followed by another."""
    requests_running: Gauge
    requests_waiting: Gauge
    instances: Callable[[str], Gauge]
    """By state."""

    @classmethod
    def create(cls, registry: CollectorRegistry, model: str, instance: str) -> "RouterMetrics":
        family = _Family(registry, model, "router", instance)
        return cls(
            time_to_first_token_seconds=family.histogram(
                "kvrelay_time_to_first_token_seconds", "Request received to first token.", _WAIT_S
            ),
            inter_token_latency_seconds=family.histogram(
                "kvrelay_inter_token_latency_seconds", "Each gap between tokens.", _TOKEN_GAP_S
            ),
            e2e_request_latency_seconds=family.histogram(
                "kvrelay_e2e_request_latency_seconds", "Request received to its end.", _WHOLE_S
            ),
            request_queue_time_seconds=family.histogram(
                "kvrelay_request_queue_time_seconds",
                "Request received to first computed.",
                _WAIT_S,
            ),
            prefill_time_seconds=family.histogram(
                "kvrelay_prefill_time_seconds", "First computed to first token sampled.", _WAIT_S
            ),
            decode_time_seconds=family.histogram(
                "kvrelay_decode_time_seconds", "First token to the end of the answer.", _WHOLE_S
            ),
            time_per_output_token_seconds=family.histogram(
                "kvrelay_time_per_output_token_seconds",
                "Mean gap between the tokens of one answer.",
                _TOKEN_GAP_S,
            ),
            request_prompt_tokens=family.histogram(
                "kvrelay_request_prompt_tokens", "Prompt tokens of an answered request.", _LENGTHS
            ),
            request_output_tokens=family.histogram(
                "kvrelay_request_output_tokens", "Output tokens of an answered request.", _LENGTHS
            ),
            good_requests_total=family.counter(
                "kvrelay_good_requests_total",
                "Answers whose first token and time per token met their objectives.",
            ),
            objective_seconds=family.gauges(
                "kvrelay_objective_seconds", "What answers should meet; 0: not set.", "objective"
            ),
            requests_total=family.counters(
                "kvrelay_requests_total", "Requests by how they ended.", "outcome", OUTCOMES
            ),
            placements_total=family.counters(
                "kvrelay_placements_total",
                "Attempts by whether prompt and answer were placed on two instances or one.",
                "how",
                PLACEMENTS,
            ),
            retries_total=family.counter(
                "kvrelay_retries_total", "Attempts that failed and were followed by another."
            ),
            requests_running=family.gauge(
                "kvrelay_requests_running", "Requests with at least one token."
            ),
            requests_waiting=family.gauge(
                "kvrelay_requests_waiting", "Requests without a first token."
            ),
            instances=family.gauges("kvrelay_instances", "Instances by state.", "state"),
        )


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """What one instance does."""

    handoff_time_seconds: Histogram
    """Source only, like the next four."""
    handoff_bytes_total: Counter
    handoff_hidden_ratio: Histogram
    handoff_layer_lag_seconds: Histogram
    handoffs_total: Callable[[str], Counter]
    """By outcome: landed, cancelled or failed."""
    requests_running: Gauge
    requests_waiting: Gauge
    kv_blocks: Callable[[str], Gauge]
    """By state: free, cached, held or quarantined."""
    kv_usage_ratio: Gauge
    kv_fragmentation_ratio: Gauge
    cache_config: Callable[[int, int], None]
    """Says the block size, in tokens, and the number of blocks."""
    prefix_cache_queries_tokens_total: Counter
    prefix_cache_hits_tokens_total: Counter
    prompt_tokens_total: Callable[[str], Counter]
    """By source: local_compute, local_cache_hit or handoff."""
    output_tokens_total: Counter
    preemptions_total: Counter
    step_seconds: Histogram
    """Its sum grows by a second a second while the instance is busy."""
    step_tokens: Histogram
    computed_tokens_total: Callable[[str], Counter]
    """By phase: prefill or decode; with what was computed again after a preemption."""

    @classmethod
    def create(
        cls, registry: CollectorRegistry, model: str, role: str, instance: str
    ) -> "WorkerMetrics":
        family = _Family(registry, model, role, instance)
        return cls(
            handoff_time_seconds=family.histogram(
                "kvrelay_handoff_time_seconds", "Time the KV spent on the wire.", _WAIT_S
            ),
            handoff_bytes_total=family.counter(
                "kvrelay_handoff_bytes_total", "KV bytes sent to decode instances."
            ),
            handoff_hidden_ratio=family.histogram(
                "kvrelay_handoff_hidden_ratio",
                "Share of handoff time that passed while prefill computed.",
                _RATIO,
            ),
            handoff_layer_lag_seconds=family.histogram(
                "kvrelay_handoff_layer_lag_seconds",
                "A layer's last chunk written to its bytes sent; one for each layer.",
                _STEP_S,
            ),
            handoffs_total=family.counters(
                "kvrelay_handoffs_total", "Handoffs by how they ended.", "outcome", HANDOFF_OUTCOMES
            ),
            requests_running=family.gauge("kvrelay_requests_running", "Requests being computed."),
            requests_waiting=family.gauge("kvrelay_requests_waiting", "Requests in the queue."),
            kv_blocks=family.gauges("kvrelay_kv_blocks", "KV blocks by state.", "state"),
            kv_usage_ratio=family.gauge("kvrelay_kv_usage_ratio", "Share of KV blocks in use."),
            kv_fragmentation_ratio=family.gauge(
                "kvrelay_kv_fragmentation_ratio", "Share of the held slots that no token is for."
            ),
            cache_config=family.cache_config(),
            prefix_cache_queries_tokens_total=family.counter(
                "kvrelay_prefix_cache_queries_tokens_total", "Tokens looked up in the prefix cache."
            ),
            prefix_cache_hits_tokens_total=family.counter(
                "kvrelay_prefix_cache_hits_tokens_total", "Tokens found in the prefix cache."
            ),
            prompt_tokens_total=family.counters(
                "kvrelay_prompt_tokens_total",
                "Prompt tokens by where their KV came from.",
                "source",
                PROMPT_SOURCES,
            ),
            output_tokens_total=family.counter(
                "kvrelay_output_tokens_total", "Tokens written in answers."
            ),
            preemptions_total=family.counter(
                "kvrelay_preemptions_total", "Sequences that lost their blocks to others."
            ),
            step_seconds=family.histogram("kvrelay_step_seconds", "One step.", _STEP_S),
            step_tokens=family.histogram("kvrelay_step_tokens", "Tokens in one step.", _TOKENS),
            computed_tokens_total=family.counters(
                "kvrelay_computed_tokens_total", "Tokens computed in steps.", "phase", PHASES
            ),
        )

    def set_blocks(self, *, free: int, cached: int, held: int, quarantined: int = 0) -> None:
        """Take over a snapshot of the block pool."""
        for state, count in zip(BLOCK_STATES, (free, cached, held, quarantined), strict=True):
            self.kv_blocks(state).set(count)
        total = free + cached + held + quarantined
        self.kv_usage_ratio.set((held + quarantined) / total if total else 0.0)
