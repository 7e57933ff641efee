"""What stands outside of the code about metrics: dashboards, rules, and programs that read them."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from services.runtime.metrics import RouterMetrics, WorkerMetrics
from services.runtime.vllm_names import INSTANCE, ROUTER, BothNames, in_both_names

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")
METRIC = re.compile(r"\bkvrelay[_:][a-z0-9_:]+")


def program(name: str) -> str:
    """Where ``prometheus`` or ``promtool`` is; else the test is skipped."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


def rules(name: str) -> list[dict[str, Any]]:
    """The rules of one file, in order."""
    groups = yaml.safe_load((PROMETHEUS / name).read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Of every panel of every dashboard: where it stands, and its PromQL."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text("utf-8"))["panels"]:
            for target in panel["targets"]:
                yield f"{path.name}: {panel['title']}", target["expr"]


def families() -> dict[str, Any]:
    """Every metric family of router and instances by name, theirs of vLLM, too."""
    router, measured, worker = (CollectorRegistry() for _ in range(3))
    router.register(BothNames(measured.collect))
    metrics = RouterMetrics.create(measured, "m", "r")
    metrics.instances("ready").set(1)
    metrics.objective_seconds("ttft").set(0)
    on_worker = WorkerMetrics.create(worker, "m", "decode", "d")
    on_worker.set_blocks(free=1, cached=0, held=0)
    on_worker.cache_config(16, 1)
    both = [*router.collect(), *in_both_names(worker.collect())]
    assert len(ROUTER) + len(INSTANCE) == sum(each.name.startswith("vllm:") for each in both)
    return {each.name: each for each in both}


def measured_names() -> set[str]:
    """Names that PromQL may use: samples, and what recording rules make of them."""
    samples = {name + suffix for name in families() for suffix in SUFFIXES}
    return samples | {rule["record"] for rule in rules("recording.yml")}
