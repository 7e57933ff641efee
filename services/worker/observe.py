"""An instance's numbers: from snapshots and steps to Prometheus and to the router's heartbeat.

Counters of the engine count from its start; Prometheus gets what was added since the last look.
Knows no service. Used by ``services.worker.app``.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric

from engine.core import EngineLoad, StepRecord
from engine.kv.journal import CacheNews
from kvtransfer.stats import EndpointStats
from protos import cluster_pb2
from services.runtime.metrics import WorkerMetrics
from services.runtime.settings import Role
from services.runtime.vllm_names import in_both_names

# How the source's endings are named in metrics, where a handoff lands or does not.
HANDOFF_OUTCOMES = {
    "released": "landed",
    "cancelled": "cancelled",
    "refused": "failed",
    "failed": "failed",
}


class Increments:
    """Turns totals that somebody else counts into increments of a Prometheus counter."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def add(self, name: str, counter: Counter, total: float) -> None:
        """Count what ``name`` has grown by since the last call; one that is smaller began anew."""
        seen = self._seen.get(name, 0)
        counter.inc(total - seen if total >= seen else total)
        self._seen[name] = total


class Observer:
    """Feeds the metrics of one instance, which are others in another role.

    Args:
        registry: what is served; the metrics of the present role are in it.
        block_size, num_blocks: of the KV cache.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model: str,
        instance_id: str,
        block_size: int,
        num_blocks: int,
    ) -> None:
        self._cache_shape = (block_size, num_blocks)
        self._labels = (model, instance_id)
        self._present = CollectorRegistry()
        self._increments = Increments()
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Called by Prometheus."""
        return in_both_names(self._present.collect())

    def metrics_for(self, role: Role) -> WorkerMetrics:
        """The metrics of an instance that has this role from now on."""
        self._present = CollectorRegistry()
        model, instance_id = self._labels
        self._metrics = WorkerMetrics.create(self._present, model, role, instance_id)
        self._metrics.cache_config(*self._cache_shape)
        return self._metrics

    def stepped(self, record: StepRecord) -> None:
        self._metrics.step_seconds.observe(record.elapsed_s)
        self._metrics.step_tokens.observe(record.num_decode_tokens + record.num_prefill_tokens)
        self._metrics.computed_tokens_total("decode").inc(record.num_decode_tokens)
        self._metrics.computed_tokens_total("prefill").inc(record.num_prefill_tokens)

    def snapshot(self, load: EngineLoad, handoffs: EndpointStats) -> None:
        """Take over the engine's and, of a source, the KV endpoint's numbers."""
        metrics, blocks, add = self._metrics, load.blocks, self._increments.add
        metrics.set_blocks(
            free=blocks.free,
            cached=blocks.cached,
            held=blocks.held,
            quarantined=blocks.quarantined,
        )
        metrics.kv_fragmentation_ratio.set(load.fragmentation_ratio)
        metrics.requests_running.set(load.requests_running)
        metrics.requests_waiting.set(load.requests_waiting)
        add("preemptions", metrics.preemptions_total, load.num_preemptions)
        queries, hits = load.prefix_query_tokens, load.prefix_hit_tokens
        add("queries", metrics.prefix_cache_queries_tokens_total, queries)
        add("hits", metrics.prefix_cache_hits_tokens_total, hits)
        add("bytes", metrics.handoff_bytes_total, handoffs.num_bytes)
        for ended, outcome in HANDOFF_OUTCOMES.items():
            total = handoffs.outcomes.get(ended, 0)
            add(ended, metrics.handoffs_total(outcome), total)


def news_message(news: CacheNews) -> cluster_pb2.CacheNews:
    """What entered and left the prefix cache, as it travels to the router."""
    return cluster_pb2.CacheNews(
        next_sequence=news.next_sequence,
        is_whole=news.is_whole,
        stored=b"".join(news.stored),
        removed=b"".join(news.removed),
    )


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
        prompt_tokens_waiting=load.prompt_tokens_waiting,
        handoffs_active=num_handoffs,
        draining=draining,
    )
