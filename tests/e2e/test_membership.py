"""Drain, role, restart and several routers, under load: no request is lost, none differs."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.cli.main import run as kvrelay
from tests.e2e.harness import Cluster, Generated, eventually, request, serve
from tests.e2e.test_orchestrated import router, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TOKEN = "for tests"
WAYS: list[dict[str, Any]] = [
    {"ids": [n % 250 for n in range(100)], "max_tokens": 200, "ignore_eos": True},
    {
        "ids": [n % 240 for n in range(37)],
        "max_tokens": 120,
        "ignore_eos": True,
        "temperature": 0.9,
        "seed": 3,
    },
]


@pytest.fixture(scope="module")
def cluster(tiny_model: Path) -> Iterator[Cluster]:
    patched = pytest.MonkeyPatch()
    patched.setenv("KVRELAY_CLUSTER_TOKEN", TOKEN)
    options = ("--prefill", "2", "--decode", "2", "--dtype", "float32", "--kv-cache-bytes", "64MiB")
    with serve(str(tiny_model), *options, "--disaggregate-from", "0") as running:
        yield running
    patched.undo()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Generated]:
    return [cluster.generate(**way) for way in WAYS]


class Load:
    """Clients that ask again and again, and compare every answer."""

    def __init__(self, cluster: Cluster, expected: list[Generated]) -> None:
        self._cluster = cluster
        self._expected = expected
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(4)]
        self.num_answers = 0
        self.wrong: list[str] = []

    def _ask(self, number: int) -> None:
        way, expected = WAYS[number % 2], self._expected[number % 2]
        while not self._stop.is_set():
            try:
                got = self._cluster.generate(**way)
            except grpc.RpcError as error:
                self.wrong.append(str(error))
                return
            if got.token_ids != expected.token_ids or got.num_terminal != 1:
                self.wrong.append(f"{got.token_ids} is not {expected.token_ids}")
            self.num_answers += 1

    @contextlib.contextmanager
    def during(self) -> Iterator["Load"]:
        for thread in self._threads:
            thread.start()
        try:
            eventually(lambda: self.num_answers, 20, "an answer")
            yield self
            before = self.num_answers
            eventually(lambda: self.num_answers > before + 4, 20, "answers after it")
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(30)
        assert not self.wrong, self.wrong[:2]


def state_of(cluster: Cluster, instance_id: str) -> str:
    return next(i["state"] for i in cluster.status() if i["instance_id"] == instance_id)


def operate(cluster: Cluster, *arguments: str) -> None:
    assert kvrelay([*arguments, "--address", cluster.grpc_address]) == 0, arguments


def test_a_drained_instance_finishes_and_takes_no_more(
    cluster: Cluster, undisturbed: list[Generated]
) -> None:
    drained = cluster.instances("decode")[0]["instance_id"]
    with Load(cluster, undisturbed).during():
        operate(cluster, "drain", drained)
        assert state_of(cluster, drained) == "draining"
        eventually(lambda: _is_idle(cluster, drained), 20, "what ran there has ended")
    for way in WAYS:
        answer = cluster.generate(**way)
        assert answer.finished is not None
        assert answer.finished.timeline.decode_instance != drained
    operate(cluster, "undrain", drained)
    assert state_of(cluster, drained) == "ready"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_runs_on_a_drained_instance_moves_when_told(
    cluster: Cluster, undisturbed: list[Generated], role: str
) -> None:
    drained = cluster.instances(role)[0]["instance_id"]
    with Load(cluster, undisturbed).during():
        operate(cluster, "drain", drained, "--now")
        eventually(lambda: _is_idle(cluster, drained), 2, "nothing runs there any more")
    operate(cluster, "undrain", drained)


def _is_idle(cluster: Cluster, instance_id: str) -> bool:
    (found,) = [i for i in cluster.status() if i["instance_id"] == instance_id]
    return not (found["requests_running"] or found["requests_waiting"] or found["blocks_held"])


def test_a_role_changes_under_load(cluster: Cluster, undisturbed: list[Generated]) -> None:
    changed = cluster.instances("prefill")[1]
    with Load(cluster, undisturbed).during():
        operate(cluster, "role", changed["instance_id"], "decode")
        decoding = [i["instance_id"] for i in cluster.instances("decode")]
        assert changed["instance_id"] in decoding
        eventually(lambda: cluster.all_ready(4), 5, "it is ready in its new role")
        eventually(lambda: _wrote(cluster, changed["instance_id"]), 20, "it writes answers")
        operate(cluster, "role", changed["instance_id"], "prefill")
        assert len(cluster.instances("prefill")) == 2
    eventually(cluster.held_nothing, 3, "nothing held")


def _wrote(cluster: Cluster, instance_id: str) -> bool:
    finished = cluster.generate(**WAYS[1]).finished
    return finished is not None and finished.timeline.decode_instance == instance_id


def test_every_instance_is_restarted_under_load(
    cluster: Cluster, undisturbed: list[Generated]
) -> None:
    before = {i["instance_id"] for i in cluster.status()}
    with Load(cluster, undisturbed).during():
        operate(cluster, "restart")
    after = {i["instance_id"] for i in cluster.status()}
    assert len(after) == 4 and not before & after
    eventually(cluster.held_nothing, 3, "nothing held")


def test_operators_are_told_what_is_wrong(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: str) -> str:
        assert kvrelay([*arguments, "--address", cluster.grpc_address]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    assert "no instance nobody; there are: decode-" in fails("drain", "nobody")
    known = cluster.instances("decode")[0]["instance_id"]
    monkeypatch.setenv("KVRELAY_CLUSTER_TOKEN", "another")
    assert "needs the cluster token" in fails("drain", known)
    monkeypatch.delenv("KVRELAY_CLUSTER_TOKEN")
    assert "KVRELAY_CLUSTER_TOKEN is not set" in fails("role", known, "prefill")
    assert state_of(cluster, known) == "ready"


def test_two_routers_serve_one_set_of_instances_and_one_of_them_dies(tiny_model: Path) -> None:
    with router(tiny_model) as (first, one), router(tiny_model) as (second, other):
        both = f"{one},{other}"
        with worker(tiny_model, "prefill", both), worker(tiny_model, "decode", both):
            for each in (first, second):
                eventually(lambda each=each: each.all_ready(2), 5, "both are ready")
            answers = [each.generate(**WAYS[1]).token_ids for each in (first, second)]
            assert answers[0] == answers[1]
            with first.client() as stub:
                running = stub.Generate(request(**WAYS[0] | {"max_tokens": 1500}), timeout=50)
                next(running)
                eventually(lambda: not second.held_nothing(), 5, "the other one sees the load")
                os.kill(first.process.pid, signal.SIGKILL)
                with pytest.raises(grpc.RpcError):
                    for _ in running:
                        pass
            eventually(second.held_nothing, 2, "what the dead router had asked for is gone")
            assert second.generate(**WAYS[1]).token_ids == answers[1]


def test_a_router_that_comes_back_knows_everybody(tiny_model: Path) -> None:
    with router(tiny_model) as (first, address):
        ports = [each.rsplit(":", 1)[1] for each in (first.grpc_address, address)]
        with worker(tiny_model, "prefill", address), worker(tiny_model, "decode", address):
            eventually(lambda: first.all_ready(2), 5, "both are ready")
            expected = first.generate(**WAYS[1]).token_ids
            os.kill(first.process.pid, signal.SIGKILL)
            first.process.wait()
            again = ("--grpc-port", ports[0], "--internal-port", ports[1])
            with router(tiny_model, *again) as (second, _):
                began_s = time.monotonic()
                eventually(lambda: second.all_ready(2), 5, "everybody has registered again")
                assert time.monotonic() - began_s < 3
                assert second.generate(**WAYS[1]).token_ids == expected


def test_a_cluster_grows_and_shrinks_under_load(
    cluster: Cluster, undisturbed: list[Generated]
) -> None:
    with Load(cluster, undisturbed).during():
        operate(cluster, "scale", "--prefill", "3", "--decode", "3")
        assert cluster.all_ready(6)
        operate(cluster, "scale", "--prefill", "1", "--decode", "1")
        eventually(lambda: len(cluster.status()) == 2, 2, "the others have gone")
    operate(cluster, "scale", "--prefill", "2", "--decode", "2")
    assert cluster.all_ready(4)
    assert kvrelay(["scale", "--decode", "0", "--address", cluster.grpc_address]) == 1
    eventually(cluster.held_nothing, 3, "nothing held")
