"""Chart and kustomize: they render, Kubernetes would take them, and our command line, too."""

from typing import Any

import pytest
import yaml

from services.cli.main import app
from services.runtime.settings import Role, RouterConfig, WorkerConfig
from tests.deploy.charts import (
    BASE,
    CHART,
    VALUES,
    Manifest,
    command_line,
    containers,
    find,
    kustomized,
    render,
)
from tests.deploy.observed import METRIC, measured_names

OVERLAYS = ("cpu", "gpu")
CUSTOM = {"ScaledObject", "ServiceMonitor"}
"""Kinds whose schema is not Kubernetes' own."""


@pytest.fixture(params=[*VALUES, *OVERLAYS])
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    if request.param in VALUES:
        return render(VALUES[request.param])
    return kustomized(f"overlays/{request.param}")


def test_kubernetes_would_take_them(manifests: list[Manifest]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in manifests:
        if manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_the_validator_would_notice_a_typo() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    deployment = find(render({}), "Deployment", "kvrelay-decode")
    deployment["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, "1.37", strict=True)


@pytest.mark.parametrize("name", VALUES)
def test_lint_is_content(name: str) -> None:
    helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk (Linux, x86-64)")
    report = helm.lint(CHART, VALUES[name], strict=True, kube_version="v1.30.0")
    worse_than_advice = [each for each in report["messages"] if each["severity"] > 1]
    assert not report["errors"] and not worse_than_advice


@pytest.mark.parametrize(
    "values",
    [
        {"decode": {"replicas": 0}},
        {"worker": {"device": "tpu"}},
        {"autoscaling": {"kind": "vpa"}},
        {"rooter": {}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk (Linux, x86-64)")
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError):
        chart.validate_schema(chart.merge_values(values))


def test_every_command_line_is_one_of_ours(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed by the real command line into a config that a real service would start with."""
    started: list[RouterConfig | WorkerConfig] = []

    def start(config: RouterConfig | WorkerConfig) -> None:
        config.validate()
        started.append(config)

    monkeypatch.setattr("services.cli.main._run_alone", start)
    for _, container in containers(manifests):
        program, *arguments = command_line(container)
        assert program == "kvrelay"
        assert not app(arguments, standalone_mode=False)
    assert sorted(getattr(config, "role", "router") for config in started) == [
        Role.DECODE,
        Role.PREFILL,
        "router",
    ]


def test_ports_and_probes_fit_the_command_lines(manifests: list[Manifest]) -> None:
    for _, container in containers(manifests):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        said = [word.rpartition("=")[2] for word in command_line(container) if "-port=" in word]
        said += [word.rpartition("=")[2] for word in command_line(container) if "--port=" in word]
        assert {str(port) for port in ports.values()} == set(said)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[probe]["httpGet"]
            assert asked["port"] in ports
            assert asked["path"] == ("/ready" if probe == "readinessProbe" else "/health")


def test_containers_may_do_nothing_but_serve(manifests: list[Manifest]) -> None:
    for pod, container in containers(manifests):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        environment = {variable["name"]: variable for variable in container["env"]}
        assert "secretKeyRef" in environment["KVRELAY_CLUSTER_TOKEN"]["valueFrom"]
        # What is written has a place: caches of models, of kernels, temporary files.
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert environment["XDG_CACHE_HOME"]["value"] in mounts and "/tmp" in mounts


def test_a_drain_has_its_time(manifests: list[Manifest]) -> None:
    for pod, container in containers(manifests):
        (drain,) = [w for w in command_line(container) if w.startswith("--drain-timeout-s=")]
        sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {"seconds": 0})
        needed = float(drain.partition("=")[2]) + sleep["seconds"]
        assert pod["terminationGracePeriodSeconds"] > needed


def test_selectors_find_pods_and_nothing_else(manifests: list[Manifest]) -> None:
    pods = [
        m["spec"]["template"]["metadata"]["labels"]
        for m in manifests
        if m["kind"] in ("Deployment", "StatefulSet")
    ]

    def found(selector: dict[str, str]) -> int:
        return sum(selector.items() <= labels.items() for labels in pods)

    for manifest in manifests:
        spec = manifest["spec"]
        match manifest["kind"]:
            case "Service":
                assert found(spec["selector"]) == 1
            case "PodDisruptionBudget":
                assert found(spec["selector"]["matchLabels"]) == 1
            case "NetworkPolicy":
                assert found(spec["podSelector"]["matchLabels"]) == 1
            case "HorizontalPodAutoscaler" | "ScaledObject":
                target = spec["scaleTargetRef"]
                assert find(manifests, target["kind"], target["name"])
            case "ServiceMonitor":
                services = [
                    m["spec"]["ports"]
                    for m in manifests
                    if m["kind"] == "Service"
                    and spec["selector"]["matchLabels"].items() <= m["metadata"]["labels"].items()
                ]
                (ports,) = services
                assert spec["endpoints"][0]["port"] in {port["name"] for port in ports}


def test_only_prefill_and_routers_reach_the_internal_port_of_decode() -> None:
    policy = find(render({}), "NetworkPolicy", "kvrelay-decode")
    (internal,) = [
        rule for rule in policy["spec"]["ingress"] if {"port": "internal"} in rule["ports"]
    ]
    components = {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for peer in internal["from"]
    }
    assert components == {"prefill", "router"}


def test_instances_register_with_every_router() -> None:
    manifests = render({"router": {"replicas": 3}})
    router = find(manifests, "StatefulSet", "kvrelay-router")
    service = find(manifests, "Service", router["spec"]["serviceName"])
    assert service["spec"]["publishNotReadyAddresses"] is True
    (port,) = service["spec"]["ports"]
    expected = ",".join(
        f"kvrelay-router-{i}.{service['metadata']['name']}:{port['port']}" for i in range(3)
    )
    for role in ("prefill", "decode"):
        deployment = find(manifests, "Deployment", f"kvrelay-{role}")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert f"--router={expected}" in container["args"]


@pytest.mark.parametrize("manifests", ["gpu"], indirect=True)
def test_a_gpu_for_each_instance(manifests: list[Manifest]) -> None:
    instances = [c for _, c in containers(manifests) if c["name"] == "worker"]
    assert len(instances) == 2
    for container in instances:
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert container["resources"]["limits"]["memory"]
        assert "--device=cuda" in container["args"] and container["image"].endswith("-cuda")


def test_overlay_and_values_for_gpus_agree() -> None:
    for _, container in containers(kustomized("overlays/gpu")):
        if container["name"] == "worker":
            assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
            assert "--device=cuda" in container["args"] and container["image"].endswith("-cuda")


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_autoscalers_ask_for_what_is_measured(kind: str) -> None:
    manifests = render(VALUES[kind])
    scalers = [m for m in manifests if m["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    assert {m["metadata"]["name"] for m in scalers} == {"kvrelay-prefill", "kvrelay-decode"}
    for scaler in scalers:
        asked = set(METRIC.findall(yaml.safe_dump(scaler["spec"])))
        assert "kvrelay_requests_waiting" in asked and asked <= measured_names()
        if scaler["metadata"]["name"] == "kvrelay-decode":
            assert "kvrelay_kv_usage_ratio" in asked
    # Who scales sets the number of replicas; a manifest that did would undo it.
    for manifest in manifests:
        assert manifest["kind"] != "Deployment" or "replicas" not in manifest["spec"]


def test_the_kustomize_base_is_the_chart_with_its_defaults() -> None:
    written = list(yaml.safe_load_all(BASE.read_text("utf-8")))
    assert written == render({}), "run make manifests"


def test_two_releases_in_one_namespace_share_nothing() -> None:
    names = [
        {(m["kind"], m["metadata"]["name"]) for m in render({}, release)}
        for release in ("kvrelay", "blue")
    ]
    assert not names[0] & names[1]
