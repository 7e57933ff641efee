"""Rules and dashboards: well formed, about metrics that exist, each alert proved both ways."""

import json
import subprocess

import pytest
import yaml

from services.router.membership import InstanceState
from services.runtime.metrics import BLOCK_STATES, OUTCOMES
from tests.deploy.observed import (
    DASHBOARDS,
    DEPLOY,
    METRIC,
    PROMETHEUS,
    measured_names,
    program,
    queries,
    rules,
)


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "recording.yml", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [program("promtool"), *arguments], cwd=PROMETHEUS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_proved_to_fire_and_to_stay_silent() -> None:
    proofs: dict[str, set[bool]] = {}
    for test in yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text("utf-8"))["tests"]:
        for proof in test["alert_rule_test"]:
            proofs.setdefault(proof["alertname"], set()).add(bool(proof["exp_alerts"]))
    assert proofs == {rule["alert"]: {True, False} for rule in rules("alerts.yml")}


def test_queries_and_rules_name_what_is_measured() -> None:
    asked = list(queries())
    asked += [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules("alerts.yml")]
    asked += [(rule["record"], rule["expr"]) for rule in rules("recording.yml")]
    known = measured_names()
    unknown = {(where, name) for where, expr in asked for name in METRIC.findall(expr)} - {
        (where, name) for where, _ in asked for name in known
    }
    assert not unknown


def test_rules_name_outcomes_and_states_that_exist() -> None:
    said = (PROMETHEUS / "recording.yml").read_text("utf-8")
    for outcome in ("internal", "unavailable", "deadline_exceeded", "resource_exhausted", "length"):
        assert outcome in said and outcome in OUTCOMES
    assert "quarantined" in BLOCK_STATES and InstanceState.READY == "ready"


def test_dashboards_are_five_with_ids_of_their_own_and_our_data_source() -> None:
    dashboards = [json.loads(path.read_text("utf-8")) for path in DASHBOARDS]
    assert len({each["uid"] for each in dashboards}) == len(dashboards) == 5
    provisioned = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text("utf-8")
    )
    uid = provisioned["datasources"][0]["uid"]
    for dashboard in dashboards:
        panels = dashboard["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        for panel in panels:
            assert panel["title"] and panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"]["uid"] == uid
            assert all(target["datasource"]["uid"] == uid for target in panel["targets"])


def test_compose_mounts_what_is_there_and_starts_what_exists() -> None:
    from typer.testing import CliRunner

    from services.cli.main import app

    compose = yaml.safe_load((DEPLOY / "compose/compose.yml").read_text("utf-8"))
    services = compose["services"]
    assert set(services) == {"router", "prefill", "decode", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["image"].partition(":")[2], name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            is_there = (DEPLOY / "compose" / source).is_dir()
            assert source in compose["volumes"] or is_there, volume
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), port
    for name in ("router", "prefill", "decode"):
        program_name, command, *options = services[name]["command"]
        assert program_name == "kvrelay"
        help_text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        for option in options:
            if option.startswith("--"):
                assert option.partition("=")[0] in help_text, option
    for name in ("router", "prefill"):
        image = services[name]["image"].partition(":-")[2].removesuffix("}")
        files = (DEPLOY / "images").glob("*.Dockerfile")
        assert any(f"-t {image}" in path.read_text("utf-8") for path in files), image


def test_autoscaling_asks_for_metrics_that_exist() -> None:
    chart = (DEPLOY / "helm/kvrelay/templates/autoscaling.yaml").read_text("utf-8")
    asked = set(METRIC.findall(chart))
    assert asked and asked <= measured_names()
