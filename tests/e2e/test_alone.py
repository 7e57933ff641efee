"""Services started one by one, as an orchestrator does, and asked by the command line."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
KVRELAY = [sys.executable, "-m", "services.cli.main"]
WITH_TOKEN = {**os.environ, "KVRELAY_CLUSTER_TOKEN": "secret"}


@contextlib.contextmanager
def service(*arguments: str) -> Iterator[dict[str, str]]:
    """A service by itself: the addresses of its ready line; ended by SIGTERM, which is clean."""
    with subprocess.Popen(
        [*KVRELAY, *arguments], stdout=subprocess.PIPE, text=True, env=WITH_TOKEN
    ) as process:
        try:
            assert process.stdout is not None
            word, *pairs = process.stdout.readline().split()
            assert word == "ready"
            yield dict(pair.split("=", 1) for pair in pairs)
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
            assert process.stdout.read() == "", "more than one line on stdout"
        finally:
            process.kill()


def kvrelay(*arguments: str) -> str:
    """What a client command says on stdout."""
    done = subprocess.run(
        [*KVRELAY, *arguments], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout


def test_each_alone(tiny_model: Path) -> None:
    model = str(tiny_model)
    ports = ("--grpc-port", "0", "--http-port", "0", "--internal-port", "0")
    with service("router", model, *ports, "--disaggregate-from", "0") as router:
        assert set(router) == {"grpc", "http", "internal"}
        known = (model, "--router", router["internal"], "--kv-cache-bytes", "64MiB")
        with service("worker", *known, "--role", "decode") as decode:
            assert set(decode) == {"grpc", "metrics"}
            with service("worker", *known, "--role", "prefill"):
                asked = ("generate", "Hello", "--max-tokens", "4", "--json")
                answer = json.loads(kvrelay(*asked, "--address", router["grpc"]))
                assert 1 <= len(answer["token_ids"]) <= 4
                assert answer["timeline"]["prefill_instance"].startswith("prefill-")
                status = json.loads(kvrelay("status", "--json", "--address", router["grpc"]))
                roles = {each["role"]: each for each in status["instances"]}
                assert set(roles) == {"prefill", "decode"}
                assert roles["decode"]["address"] == decode["grpc"]
            # It said goodbye: the other one now does both.
            answer = json.loads(kvrelay(*asked, "--address", router["grpc"]))
            assert answer["timeline"]["prefill_instance"] == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("router", "--grpc-port", "0", "--http-port", "0", "--internal-port", "0"),
        ("worker", "--role", "decode", "--router", "127.0.0.1:1"),
    ],
)
def test_no_cluster_token(tiny_model: Path, arguments: tuple[str, ...]) -> None:
    without = {name: value for name, value in WITH_TOKEN.items() if "TOKEN" not in name}
    command = [*KVRELAY, arguments[0], str(tiny_model), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, env=without, timeout=30)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "KVRELAY_CLUSTER_TOKEN is not set" in done.stderr
