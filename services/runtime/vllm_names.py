"""Our metrics once more, under the names that tools made for vLLM read.

Autoscalers, endpoint pickers and dashboards then find what they know. Each name is on the router or
on the instances, never on both, so that sums count nothing twice. Nothing is measured here: the
copies are made when metrics are read. Called by the router's app and by ``services.worker``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_LABELS = MappingProxyType({"model": "model_name", "instance": "engine"})
_SOURCES = MappingProxyType(
    {
        "local_compute": "local_compute",
        "local_cache_hit": "local_cache_hit",
        "handoff": "external_kv_transfer",
    }
)
_REASONS = MappingProxyType({each: each for each in ("stop", "length", "abort")})


@dataclass(frozen=True, slots=True)
class Alias:
    """One name of theirs.

    Args:
        ours: the family it copies; without ``_total`` where that is a counter, like ``theirs``.
        label: ours and theirs of a label that has another name there.
        values: of that label, those that are copied, and what they are called there.
        is_summed: the label is gone; what ``values`` names is added up.
    """

    ours: str
    theirs: str
    label: tuple[str, str] | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    is_summed: bool = False


ROUTER = (
    Alias("kvrelay_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    Alias("kvrelay_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
    Alias("kvrelay_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds"),
    Alias("kvrelay_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
    Alias("kvrelay_request_queue_time_seconds", "vllm:request_queue_time_seconds"),
    Alias("kvrelay_prefill_time_seconds", "vllm:request_prefill_time_seconds"),
    Alias("kvrelay_decode_time_seconds", "vllm:request_decode_time_seconds"),
    Alias("kvrelay_request_prompt_tokens", "vllm:request_prompt_tokens"),
    Alias("kvrelay_request_output_tokens", "vllm:request_generation_tokens"),
    Alias("kvrelay_requests", "vllm:request_success", ("outcome", "finished_reason"), _REASONS),
)
"""Measured where clients are."""

INSTANCE = (
    Alias("kvrelay_requests_running", "vllm:num_requests_running"),
    Alias("kvrelay_requests_waiting", "vllm:num_requests_waiting"),
    Alias("kvrelay_kv_usage_ratio", "vllm:kv_cache_usage_perc"),
    Alias("kvrelay_prefix_cache_queries_tokens", "vllm:prefix_cache_queries"),
    Alias("kvrelay_prefix_cache_hits_tokens", "vllm:prefix_cache_hits"),
    Alias("kvrelay_preemptions", "vllm:num_preemptions"),
    Alias("kvrelay_output_tokens", "vllm:generation_tokens"),
    Alias("kvrelay_step_tokens", "vllm:iteration_tokens_total"),
    Alias("kvrelay_prompt_tokens", "vllm:prompt_tokens_by_source", ("source", "source"), _SOURCES),
    Alias("kvrelay_prompt_tokens", "vllm:prompt_tokens", ("source", ""), _SOURCES, is_summed=True),
    Alias(
        "kvrelay_prompt_tokens",
        "vllm:prompt_tokens_cached",
        ("source", ""),
        {each: "" for each in ("local_cache_hit", "handoff")},
        is_summed=True,
    ),
    Alias("kvrelay_cache_config_info", "vllm:cache_config_info", ("num_blocks", "num_gpu_blocks")),
)
"""Measured where steps are."""


class BothNames(Collector):
    """A collector for a router: what ``measured`` yields, and the copies."""

    def __init__(self, measured: Callable[[], Iterable[Metric]]) -> None:
        self._measured = measured

    def collect(self) -> Iterator[Metric]:
        return in_both_names(self._measured(), ROUTER)


def in_both_names(
    families: Iterable[Metric], aliases: tuple[Alias, ...] = INSTANCE
) -> Iterator[Metric]:
    """All families, each followed by its copies."""
    for family in families:
        yield family
        for alias in aliases:
            if alias.ours == family.name:
                yield _copy(family, alias)


def _copy(family: Metric, alias: Alias) -> Metric:
    copy = Metric(alias.theirs, family.documentation, family.type)
    samples = [each for each in family.samples if _is_copied(each, alias)]
    if alias.is_summed:
        total = sum(each.value for each in samples)
        samples = [each._replace(value=total) for each in samples[:1]]
    for each in samples:
        name = alias.theirs + each.name.removeprefix(alias.ours)
        copy.samples.append(each._replace(name=name, labels=_labels(each, alias)))
    return copy


def _is_copied(sample: Sample, alias: Alias) -> bool:
    if alias.label is None or not alias.values:
        return True
    return sample.labels[alias.label[0]] in alias.values


def _labels(sample: Sample, alias: Alias) -> dict[str, str]:
    labels = {_LABELS.get(name, name): value for name, value in sample.labels.items()}
    del labels["role"]
    if alias.label is not None:
        ours, theirs = alias.label
        value = labels.pop(ours)
        if not alias.is_summed:
            labels[theirs] = alias.values.get(value, value)
    return labels
