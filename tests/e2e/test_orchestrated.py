"""Each service alone, as an orchestrator starts it: a router, and workers that find it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.e2e.harness import Cluster, eventually

READY = re.compile(r"^ready grpc=(\S+) http=(\S+) internal=(\S+)$")
ENVIRONMENT = {**os.environ, "KVRELAY_CLUSTER_TOKEN": "for tests", "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def service(*arguments: str, exit_code: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One service and its first line; stopped by SIGTERM at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        yield process, process.stdout.readline().strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) in (exit_code, -signal.SIGKILL)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()
        process.stdin.close()


@contextlib.contextmanager
def router(model: Path, *options: str) -> Iterator[tuple[Cluster, str]]:
    """A router without instances, and the address where they register. A test may kill it."""
    ports = ("--grpc-port", "0", "--http-port", "0", "--internal-port", "0")
    arguments = ("router", str(model), *ports, "--disaggregate-from", "0", *options)
    with service(*arguments) as (process, line):
        match = READY.match(line)
        assert match, line
        yield Cluster(process, match[1], match[2]), match[3]


def worker(
    model: Path, role: str, address: str, *options: str
) -> contextlib.AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    base = ("worker", str(model), "--role", role, "--router", address, "--dtype", "float32")
    return service(*base, *options)


def test_the_parts_find_each_other(tiny_model: Path) -> None:
    with router(tiny_model) as (cluster, address):
        with pytest.raises(grpc.RpcError) as caught:
            cluster.generate(ids=[1, 2, 3], max_tokens=4)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        with worker(tiny_model, "prefill", address), worker(tiny_model, "decode", address):
            eventually(lambda: cluster.all_ready(2), 5, "both are ready")
            answer = cluster.generate(ids=list(range(100)), max_tokens=4, ignore_eos=True)
            assert answer.finished is not None and answer.finished.timeline.prefill_instance
            eventually(cluster.held_nothing, 2, "nothing held")
        eventually(lambda: not cluster.status(), 2, "both said goodbye")


def test_a_prompt_too_long_for_the_prefill_instance(tiny_model: Path) -> None:
    """PAINS 7 and 8: who can hold it reads it; what nobody can hold is refused at once."""
    ids = [n % 250 for n in range(1500)]
    small, large = ("--kv-cache-bytes", "512KiB"), ("--kv-cache-bytes", "64MiB")
    with router(tiny_model) as (cluster, address):
        with worker(tiny_model, "prefill", address, *small):
            with worker(tiny_model, "decode", address, *large):
                eventually(lambda: cluster.all_ready(2), 5, "both are ready")
                alone = cluster.generate(ids=ids, max_tokens=4, ignore_eos=True)
                assert alone.finished is not None
                assert not alone.finished.timeline.prefill_instance
                shorter = cluster.generate(ids=ids[:100], max_tokens=4, ignore_eos=True)
                assert shorter.finished is not None
                assert shorter.finished.timeline.prefill_instance
            with worker(tiny_model, "decode", address, *small):
                eventually(lambda: cluster.all_ready(2), 5, "both are ready")
                started_s = time.monotonic()
                with pytest.raises(grpc.RpcError) as caught:
                    cluster.generate(ids=ids, max_tokens=4)
                assert time.monotonic() - started_s < 1
                assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert "1500" in caught.value.details()
        with worker(tiny_model, "colocated", address, *large):
            eventually(lambda: cluster.all_ready(1), 5, "it is ready")
            again = cluster.generate(ids=ids, max_tokens=4, ignore_eos=True)
            assert again.token_ids == alone.token_ids


def test_an_instance_of_another_recipe_is_refused(tiny_model: Path) -> None:
    """PAINS 26: with the reason, and it does not stay."""
    with router(tiny_model) as (cluster, address), worker(tiny_model, "prefill", address):
        eventually(lambda: cluster.all_ready(1), 5, "one is ready")
        other = ("worker", str(tiny_model), "--role", "decode", "--router", address)
        refused = subprocess.run(
            [sys.executable, "-m", "services.cli.main", *other, "--dtype", "bfloat16"],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=30,
            stdin=subprocess.PIPE,
        )
        assert refused.returncode != 0
        assert "refused" in refused.stderr.splitlines()[-1], refused.stderr
        assert len(cluster.status()) == 1
