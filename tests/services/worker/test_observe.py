"""Totals of others as increments, and metrics that follow the role."""

from prometheus_client import Counter, generate_latest

from services.runtime.metrics import new_registry
from services.runtime.settings import Role
from services.worker.observe import Increments, Observer


def test_a_total_that_began_anew_never_counts_backwards() -> None:
    counter, increments = Counter("things", "Of some kind.", registry=None), Increments()
    for total, expected in ((3, 3), (3, 3), (10, 10), (4, 14), (0, 14), (5, 19)):
        increments.add("a", counter, total)
        assert counter._value.get() == expected


def test_metrics_have_the_present_role() -> None:
    registry = new_registry()
    observer = Observer(registry, "m", "i", 16, 100)
    for role in (Role.PREFILL, Role.DECODE, Role.PREFILL):
        observer.metrics_for(role).output_tokens_total.inc()
        text = generate_latest(registry).decode()
        lines = [x for x in text.splitlines() if x.startswith("kvrelay_output_tokens_total")]
        assert lines == [
            f'kvrelay_output_tokens_total{{instance="i",model="m",role="{role.value}"}} 1.0'
        ]


def test_instances_also_speak_the_names_of_vllm() -> None:
    registry = new_registry()
    observer = Observer(registry, "m", "i", 16, 100)
    metrics = observer.metrics_for(Role.DECODE)
    metrics.prompt_tokens_total("local_compute").inc(5)
    metrics.prompt_tokens_total("local_cache_hit").inc(16)
    metrics.prompt_tokens_total("handoff").inc(100)
    metrics.step_tokens.observe(7)
    theirs = {"model_name": "m", "engine": "i"}
    for name, labels, value in (
        ("vllm:prompt_tokens_total", {}, 121),
        ("vllm:prompt_tokens_cached_total", {}, 116),
        ("vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"}, 100),
        ("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}, 5),
        ("vllm:cache_config_info", {"block_size": "16", "num_gpu_blocks": "100"}, 1),
        ("vllm:iteration_tokens_total_sum", {}, 7),
        ("vllm:num_requests_waiting", {}, 0),
        ("vllm:generation_tokens_total", {}, 0),
    ):
        assert registry.get_sample_value(name, {**theirs, **labels}) == value, name
