"""Metric names, labels and the port that serves them."""

import asyncio
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.runtime.errors import InvalidArgument, Unavailable
from services.runtime.metrics import RouterMetrics, WorkerMetrics, new_registry
from services.runtime.metrics_server import MetricsServer


def _families(registry: CollectorRegistry) -> dict[str, set[str]]:
    return {
        family.name: {label for sample in family.samples for label in sample.labels}
        for family in registry.collect()
        if family.name.startswith("kvrelay_")
    }


def test_every_metric_says_model_role_and_instance() -> None:
    router, worker = CollectorRegistry(), CollectorRegistry()
    RouterMetrics.create(router, "m", "r1").requests_total("stop").inc()
    metrics = WorkerMetrics.create(worker, "m", "prefill", "i1")
    metrics.set_blocks(free=6, cached=2, held=1, quarantined=1)
    for registry in (router, worker):
        families = _families(registry)
        for unseen in (
            "kvrelay_instances",
            "kvrelay_objective_seconds",
            "kvrelay_cache_config_info",
        ):
            families.pop(unseen, None)
        assert families
        for name, labels in families.items():
            assert {"model", "role", "instance"} <= labels, name


def test_a_name_is_measured_by_router_or_worker_except_the_queue() -> None:
    router, worker = CollectorRegistry(), CollectorRegistry()
    RouterMetrics.create(router, "m", "r1")
    WorkerMetrics.create(worker, "m", "prefill", "i1")
    both = _families(router).keys() & _families(worker).keys()
    assert both == {"kvrelay_requests_running", "kvrelay_requests_waiting"}


def test_blocks_are_set_from_a_snapshot() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics.create(registry, "m", "decode", "i1")
    metrics.set_blocks(free=6, cached=2, held=1, quarantined=1)
    labels = {"model": "m", "role": "decode", "instance": "i1"}
    for state, count in {"free": 6, "cached": 2, "held": 1, "quarantined": 1}.items():
        assert registry.get_sample_value("kvrelay_kv_blocks", {**labels, "state": state}) == count
    assert registry.get_sample_value("kvrelay_kv_usage_ratio", labels) == pytest.approx(0.2)
    metrics.set_blocks(free=0, cached=0, held=0)
    assert registry.get_sample_value("kvrelay_kv_usage_ratio", labels) == 0


def test_known_outcomes_exist_at_zero_and_nothing_is_named_created() -> None:
    registry = new_registry()
    WorkerMetrics.create(registry, "m", "prefill", "i1")
    text = generate_latest(registry).decode()
    for source in ("local_compute", "local_cache_hit", "handoff"):
        assert f'source="{source}"}} 0.0' in text
    assert 'outcome="landed"' in text
    assert "_created" not in text
    assert "process_resident_memory_bytes" in text


async def test_the_metrics_port_serves_and_stops() -> None:
    registry = CollectorRegistry()
    RouterMetrics.create(registry, "m", "r1")
    server = MetricsServer(registry, "127.0.0.1", 0)
    await server.start()
    url = f"http://{server.address}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        assert b"kvrelay_requests_running" in answer.read()
    taken = MetricsServer(registry, "127.0.0.1", server.port)
    with pytest.raises(Unavailable, match="in use"):
        await taken.start()
    await server.stop()
    await server.stop()
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=5)


def status_of(address: str, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


async def test_probes_ask_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.runtime.metrics_server.ASK_TIMEOUT_S", 0.1)
    ready = False
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0, is_ready=lambda: ready)
    await server.start()

    async def ask(path: str) -> int:
        return await asyncio.to_thread(status_of, server.address, path)

    try:
        assert (await ask("/health"), await ask("/ready")) == (200, 503)
        ready = True
        assert (await ask("/health"), await ask("/ready")) == (200, 200)
        # Asked from here, the loop stands still until the answer is there.
        assert status_of(server.address, "/health") == status_of(server.address, "/ready") == 503
    finally:
        await server.stop()


async def test_a_public_metrics_port_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--insecure"):
        await MetricsServer(CollectorRegistry(), "0.0.0.0", 0).start()
