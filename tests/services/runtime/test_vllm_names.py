"""Copies under vLLM's names: on one side each, with the values of ours."""

from prometheus_client import CollectorRegistry, generate_latest

from services.runtime.metrics import RouterMetrics, WorkerMetrics
from services.runtime.vllm_names import INSTANCE, ROUTER, BothNames


def test_every_alias_copies_a_metric_that_exists_and_is_on_one_side() -> None:
    router, worker = CollectorRegistry(), CollectorRegistry()
    RouterMetrics.create(router, "m", "r")
    WorkerMetrics.create(worker, "m", "decode", "d")
    for registry, aliases in ((router, ROUTER), (worker, INSTANCE)):
        ours = {family.name for family in registry.collect()}
        assert {alias.ours for alias in aliases} <= ours
    assert not {each.theirs for each in ROUTER} & {each.theirs for each in INSTANCE}


def test_a_router_counts_successes_by_reason_and_copies_whole_histograms() -> None:
    measured, registry = CollectorRegistry(), CollectorRegistry()
    registry.register(BothNames(measured.collect))
    metrics = RouterMetrics.create(measured, "m", "r")
    for outcome in ("stop", "stop", "length", "unavailable"):
        metrics.requests_total(outcome).inc()
    metrics.time_to_first_token_seconds.observe(0.02)
    text = generate_latest(registry).decode()
    assert (
        'vllm:request_success_total{engine="r",finished_reason="stop",model_name="m"} 2.0' in text
    )
    assert 'finished_reason="unavailable"' not in text
    assert 'vllm:time_to_first_token_seconds_count{engine="r",model_name="m"} 1.0' in text
    assert 'le="0.025",model_name="m"} 1.0' in text
    assert 'kvrelay_requests_total{instance="r",model="m",outcome="unavailable",' in text
