"""Real child processes: how they come up, say why not, and never stay behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.launch.place import LaunchError
from services.launch.processes import ChildProcess
from services.launch.transfer import write_config
from services.runtime.settings import RouterConfig
from tests.e2e.harness import (
    START_TIMEOUT_S,
    Cluster,
    all_gone,
    collect,
    eventually,
    request,
    serve,
    title_of,
)

KVRELAY = [sys.executable, "-m", "services.cli.main"]
ANY_PORTS = ["--grpc-port", "0", "--http-port", "0"]


@pytest.fixture(autouse=True)
def cluster_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CLUSTER_TOKEN", "secret")


def router_of(model: Path | str) -> RouterConfig:
    return RouterConfig(model=str(model), grpc_port=0, http_port=0, internal_port=0)


async def test_a_child_comes_and_goes(tiny_model: Path) -> None:
    child = await ChildProcess.start("router", router_of(tiny_model))
    assert set(child.addresses) == {"grpc", "http", "internal"}
    assert os.getsid(child.pid) == child.pid, "a Ctrl-C at the terminal would reach it"
    await child.stop(10.0)
    assert await child.died() == "exited with code 0 and no reason"
    assert not psutil.pid_exists(child.pid)


async def test_a_child_that_cannot_start_says_why() -> None:
    with pytest.raises(LaunchError, match=r"^router: .*/nonexistent") as caught:
        await ChildProcess.start("router", router_of("/nonexistent"))
    assert "\n" not in str(caught.value)


async def test_a_killed_child_is_noticed(tiny_model: Path) -> None:
    child = await ChildProcess.start("router", router_of(tiny_model))
    os.kill(child.pid, signal.SIGKILL)
    async with asyncio.timeout(1):
        assert await child.died() == "killed by SIGKILL"
    await child.stop(1.0)


async def test_a_cancelled_start_leaves_nothing(tiny_model: Path) -> None:
    starting = asyncio.create_task(ChildProcess.start("router", router_of(tiny_model)))
    me = psutil.Process()
    while not (children := me.children()):
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(child.is_running() for child in children)


def child_by_hand(parent_pid: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "services.launch.child", str(parent_pid), "router"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def test_a_child_ends_with_its_stdin(tiny_model: Path) -> None:
    """What ends it where the kernel does not tie the two lives together."""
    with child_by_hand(os.getpid()) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(write_config(router_of(tiny_model)) + "\n")
        assert child.stdout.readline().startswith("ready ")
        child.stdin.close()
        assert child.wait(2) == 1


def test_a_child_of_somebody_else_does_not_start() -> None:
    with child_by_hand(parent_pid=1) as child:
        assert child.wait(5) == 1


@contextlib.contextmanager
def starting_serve(model: Path | str) -> Iterator["subprocess.Popen[str]"]:
    """``kvrelay serve`` that is not awaited."""
    command = [*KVRELAY, "serve", str(model), *ANY_PORTS, "--threads", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_serve_without_a_model() -> None:
    with starting_serve("/nonexistent") as process:
        out, err = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 1
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("kvrelay: router: ") and "/nonexistent" in err


@pytest.mark.parametrize("num_children", [1, 2, 4])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_starting(tiny_model: Path, num_children: int, number: int) -> None:
    with starting_serve(tiny_model) as process:
        parent = psutil.Process(process.pid)

        def family_now() -> list[psutil.Process]:
            return parent.children(recursive=True)  # type: ignore[no-any-return]

        eventually(lambda: len(family_now()) == num_children, START_TIMEOUT_S, "children")
        family = family_now()
        process.send_signal(number)
        out, err = process.communicate(timeout=START_TIMEOUT_S)
    assert (process.returncode, out, err) == (0, "", "")
    assert all_gone(family)


def family_of(cluster: Cluster) -> list[psutil.Process]:
    family: list[psutil.Process] = psutil.Process(cluster.process.pid).children(recursive=True)
    assert len(family) == 4, "router, what the workers are forked from, two workers"
    return family


@pytest.mark.slow
def test_nothing_survives_a_kill_of_the_parent(tiny_model: Path) -> None:
    with serve(str(tiny_model), expect_exit=None) as cluster:
        family = family_of(cluster)
        cluster.process.kill()
        cluster.process.wait()
        _, alive = psutil.wait_procs(family, timeout=2)
        assert not alive


@pytest.mark.slow
def test_the_routers_death_ends_the_cluster(tiny_model: Path) -> None:
    with serve(str(tiny_model), expect_exit=None) as cluster:
        family = family_of(cluster)
        router = next(child for child in family if "router" in title_of(child))
        router.kill()
        assert cluster.process.wait(10) == 1
        eventually(lambda: cluster.errors, 1, "a reason")
        assert cluster.errors[-1] == "kvrelay: router: killed by SIGKILL"
        assert all_gone(family)


@pytest.mark.slow
def test_the_second_ctrl_c_is_at_once(tiny_model: Path) -> None:
    with serve(str(tiny_model), expect_exit=None) as cluster:
        family = family_of(cluster)
        for child in family:
            child.suspend()  # nothing drains any more
        cluster.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert cluster.process.poll() is None
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(2) == 0
        assert all_gone(family)


@pytest.mark.slow
def test_a_stop_lets_what_runs_end(tiny_model: Path) -> None:
    with serve(str(tiny_model), expect_exit=None) as cluster:
        with cluster.client() as stub:
            message = request(ids=list(range(40)), max_tokens=200, ignore_eos=True)
            stream = stub.Generate(message, timeout=30)
            next(response for response in stream if response.HasField("tokens"))
            cluster.process.send_signal(signal.SIGTERM)
            rest = collect(stream)
        assert rest.finished is not None
        assert rest.finished.usage.output_tokens == 200
        assert cluster.process.wait(10) == 0
