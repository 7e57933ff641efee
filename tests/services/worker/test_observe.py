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
    observer = Observer(registry, "m", "i")
    for role in (Role.PREFILL, Role.DECODE, Role.PREFILL):
        observer.metrics_for(role).output_tokens_total.inc()
        text = generate_latest(registry).decode()
        lines = [x for x in text.splitlines() if x.startswith("kvrelay_output_tokens_total")]
        assert lines == [
            f'kvrelay_output_tokens_total{{instance="i",model="m",role="{role.value}"}} 1.0'
        ]
