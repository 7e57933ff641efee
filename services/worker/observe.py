"""An instance's numbers: from snapshots and steps to Prometheus and to the router's heartbeat.

Counters of the engine count from its start; Prometheus gets what was added since the last look.
Knows no service. Used by ``services.worker.app``.
"""

from engine.loop import EngineLoad, StepRecord
from protos import cluster_pb2
from services.runtime.metrics import WorkerMetrics


class Observer:
    """Feeds the metrics of one instance."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._seen: EngineLoad | None = None

    def stepped(self, record: StepRecord) -> None:
        self._metrics.step_seconds.observe(record.elapsed_s)
        self._metrics.step_tokens.observe(record.num_decode_tokens + record.num_prefill_tokens)

    def snapshot(self, load: EngineLoad) -> None:
        metrics, seen = self._metrics, self._seen
        blocks = load.blocks
        metrics.set_blocks(
            free=blocks.free,
            cached=blocks.cached,
            held=blocks.held,
            quarantined=blocks.quarantined,
        )
        metrics.requests_running.set(load.requests_running)
        metrics.requests_waiting.set(load.requests_waiting)
        for counter, total, before in (
            (metrics.preemptions_total, load.num_preemptions, seen and seen.num_preemptions),
            (
                metrics.prefix_cache_queries_tokens_total,
                load.prefix_query_tokens,
                seen and seen.prefix_query_tokens,
            ),
            (
                metrics.prefix_cache_hits_tokens_total,
                load.prefix_hit_tokens,
                seen and seen.prefix_hit_tokens,
            ),
        ):
            counter.inc(total - (before or 0))
        self._seen = load


def load_message(load: EngineLoad, num_handoffs: int, draining: bool) -> cluster_pb2.InstanceLoad:
    """A snapshot as it travels to the router."""
    blocks = load.blocks
    return cluster_pb2.InstanceLoad(
        blocks_total=blocks.total,
        blocks_free=blocks.free,
        blocks_cached=blocks.cached,
        blocks_held=blocks.held,
        blocks_quarantined=blocks.quarantined,
        requests_running=load.requests_running,
        requests_waiting=load.requests_waiting,
        handoffs_active=num_handoffs,
        draining=draining,
    )
