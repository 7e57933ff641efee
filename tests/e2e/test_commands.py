"""The client commands against a real cluster; services that lack what they need to start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import Cluster

KVRELAY = [sys.executable, "-m", "services.cli.main"]


def kvrelay(cluster: Cluster, *arguments: str) -> str:
    """What a client command says on stdout."""
    command = [*KVRELAY, *arguments, "--address", cluster.grpc_address]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr == ""
    return done.stdout


def test_generate(cluster: Cluster) -> None:
    text = kvrelay(cluster, "generate", "Hello", "--chat", "--max-tokens", "6")
    answer = json.loads(
        kvrelay(cluster, "generate", "Hello", "--chat", "--max-tokens", "6", "--json")
    )
    assert text == answer["text"] + "\n"
    assert 1 <= len(answer["token_ids"]) == answer["usage"]["output_tokens"] <= 6
    assert answer["finish_reason"] in ("length", "stop")
    assert answer["timeline"]["prefill_instance"].startswith("prefill-")


def test_trace(cluster: Cluster) -> None:
    prompt = "A prompt that is long enough for blocks of its own. " * 4
    answer = json.loads(kvrelay(cluster, "generate", prompt, "--max-tokens", "6", "--json"))
    command = [*KVRELAY, "trace", answer["request_id"], "--url", cluster.url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    events = json.loads(done.stdout)["traceEvents"]
    bars = {event["name"]: event for event in events if event["ph"] == "X"}
    assert {"request", "queue", "prefill", "handoff", "decode", "layer 0", "layer 1"} <= set(bars)
    whole = bars["request"]
    assert all(bar["ts"] >= 0 and bar["dur"] >= 0 for bar in bars.values())
    assert bars["decode"]["ts"] + bars["decode"]["dur"] <= whole["dur"] + 1
    steps = [event for event in events if event["name"] == "tokens"]
    assert len(steps) == answer["usage"]["output_tokens"] == whole["args"]["output_tokens"]
    assert [event["args"] for event in events if event["name"] == "chunk"][-1] == {
        "num_computed_tokens": answer["usage"]["prompt_tokens"]
    }
    assert "prompt that" not in done.stdout
    unknown = subprocess.run(
        [*command[:-3], "0" * 24, *command[-2:]], capture_output=True, text=True
    )
    assert unknown.returncode == 1 and "no such request" in unknown.stderr


def test_status(cluster: Cluster) -> None:
    status = json.loads(kvrelay(cluster, "status", "--json"))
    told = {instance["instance_id"]: instance for instance in cluster.status()}
    assert len(status["instances"]) == 2
    for instance in status["instances"]:
        assert instance["address"] == told[instance["instance_id"]]["address"]
        assert instance["state"] == "ready"
        blocks = ("free", "cached", "held", "quarantined")
        accounted = sum(instance[f"blocks_{name}"] for name in blocks)
        assert accounted == instance["blocks_total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("router", "--grpc-port", "0", "--http-port", "0", "--internal-port", "0"),
        ("worker", "--role", "decode", "--router", "127.0.0.1:1"),
    ],
)
def test_no_cluster_token(tiny_model: Path, arguments: tuple[str, ...]) -> None:
    without = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
    command = [*KVRELAY, arguments[0], str(tiny_model), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, env=without, timeout=30)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "KVRELAY_CLUSTER_TOKEN is not set" in done.stderr
