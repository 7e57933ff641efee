"""Kill, cancel and vanish: everyone gets one answer or one clear error, and nothing stays held."""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from protos import inference_pb2_grpc
from tests.e2e.harness import Cluster, collect, eventually, request, serve

OPTIONS = ("--disaggregate-from", "0", "--dtype", "float32", "--kv-cache-bytes", "64MiB")


@pytest.fixture
def own_cluster(tiny_model: Path) -> Iterator[Cluster]:
    """A cluster that the test may hurt."""
    with serve(str(tiny_model), *OPTIONS) as running:
        yield running
        eventually(running.held_nothing, 3, "everything free at the end")


def ids(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}-{seed}").choices(range(250), k=length)


def test_the_only_decode_instance_is_killed_mid_stream(own_cluster: Cluster) -> None:
    """PAINS 9: it is back within a second, and the stream goes on, token for token."""
    before = own_cluster.instances("decode")[0]["instance_id"]
    asked = {"ids": ids(300), "max_tokens": 1500, "ignore_eos": True}
    expected = own_cluster.generate(**asked)
    killed_s = 0.0
    got: list[int] = []
    with own_cluster.client() as stub:
        pid = own_cluster.pid_of("decode")
        for response in stub.Generate(request(**asked), timeout=50):
            got += response.tokens.token_ids
            if not killed_s and len(got) >= 5:
                os.kill(pid, signal.SIGKILL)
                killed_s = time.monotonic()
    assert got == expected.token_ids
    assert response.finished.timeline.attempts == 2
    eventually(lambda: own_cluster.all_ready(2), 20, "the decode instance is back")
    assert own_cluster.instances("decode")[0]["instance_id"] != before
    eventually(own_cluster.held_nothing, 2, "nothing held")


def test_the_only_prefill_instance_is_killed_under_load(own_cluster: Cluster) -> None:
    """PAINS 7: the decode instance does not wait for one that died, and nobody fails."""
    before = own_cluster.instances("prefill")[0]["instance_id"]
    pid = own_cluster.pid_of("prefill")
    healed = itertools.count()
    answered = itertools.count()
    killed = threading.Event()

    def ask(seed: int) -> None:
        """One prompt after the other, none like another, until one hits the kill."""
        while not killed.is_set():
            prompt = ids(1800, seed * 1000 + next(answered))
            answer = own_cluster.generate(ids=prompt, max_tokens=3, ignore_eos=True)
            assert len(answer.token_ids) == 3
            if answer.finished is not None and answer.finished.timeline.attempts > 1:
                next(healed)

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, seed) for seed in range(8)]
        eventually(lambda: next(answered) > 12, 10, "prefill is busy")
        os.kill(pid, signal.SIGKILL)
        killed.set()
        for each in asking:
            each.result(30)
    assert next(healed), "the kill came too late to hit a request"
    eventually(lambda: own_cluster.all_ready(2), 20, "the prefill instance is back")
    assert own_cluster.instances("prefill")[0]["instance_id"] != before
    eventually(own_cluster.held_nothing, 2, "nothing held")
    answer = own_cluster.generate(ids=ids(40), max_tokens=4, ignore_eos=True)
    assert answer.finished is not None and answer.finished.timeline.prefill_instance


def test_decode_paused_and_resumed(own_cluster: Cluster) -> None:
    """The only one hangs: bounded wait, clear error, and it is used again once it moves."""
    pid = own_cluster.pid_of("decode")
    os.kill(pid, signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            own_cluster.generate(ids=ids(300), max_tokens=50, ignore_eos=True)
        assert time.monotonic() - started_s < 10
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: own_cluster.all_ready(2), 20, "the decode instance is used again")
    eventually(own_cluster.held_nothing, 8, "nothing held")
    assert own_cluster.generate(ids=ids(40), max_tokens=4, ignore_eos=True).finished is not None


def test_cancel_frees_within_a_second(own_cluster: Cluster) -> None:
    """PAINS 1, 4 and 5: before the first token, at the hop and in mid-answer."""
    for wait_s in (0.0, 0.005, 0.02, 0.05, 0.1, 0.3):
        with own_cluster.client() as stub:
            message = request(ids=ids(1500, seed=int(wait_s * 1000)), max_tokens=400)
            stream = stub.Generate(message, timeout=30)
            time.sleep(wait_s)
            stream.cancel()
        eventually(own_cluster.held_nothing, 1, f"all free after a cancel at {wait_s} s")


def test_next_short_request_is_not_delayed_by_a_cancelled_one(own_cluster: Cluster) -> None:
    """PAINS 5: prefill of an abandoned prompt stops at the next chunk."""
    own_cluster.generate(ids=ids(20), max_tokens=2)
    with own_cluster.client() as stub:
        streams = [
            stub.Generate(request(ids=ids(2000, seed=i), max_tokens=9), timeout=30)
            for i in range(20)
        ]
        time.sleep(0.05)
        for stream in streams:
            stream.cancel()
        started_s = time.monotonic()
        collect(stub.Generate(request(ids=ids(20), max_tokens=2), timeout=30))
        assert time.monotonic() - started_s < 1


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_hundred_requests_a_third_cancelled(own_cluster: Cluster) -> None:
    """Mixed lengths, 16 at a time: one terminal event each, and afterwards nothing held."""
    dice = random.Random(7)
    plans = [
        (dice.choice([1, 16, 40, 130, 400, 1200]), dice.randint(1, 120), dice.random() < 1 / 3)
        for _ in range(200)
    ]

    def ask(number: int) -> str:
        length, max_tokens, cancels = plans[number]
        rng = random.Random(number)
        message = request(
            ids=ids(length, number % 20), max_tokens=max_tokens, ignore_eos=True, temperature=0.7
        )
        with own_cluster.client() as stub:
            stream = stub.Generate(message, timeout=50)
            if cancels:
                threading.Timer(rng.random() * 0.5, stream.cancel).start()
            try:
                answer = collect(stream)
            except grpc.RpcError as error:
                assert cancels and error.code() == grpc.StatusCode.CANCELLED, error.details()
                return "cancelled"
        assert answer.num_terminal == 1 and answer.finished is not None
        assert len(answer.token_ids) == answer.finished.usage.output_tokens == max_tokens
        return "finished"

    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(ask, range(200)))
    assert outcomes.count("finished") >= 130
    assert outcomes.count("cancelled") >= 10
    eventually(own_cluster.held_nothing, 1, "nothing held")


def test_clients_that_vanish(own_cluster: Cluster) -> None:
    """Sockets that close without a word."""
    for number in range(20):
        channel = grpc.insecure_channel(own_cluster.grpc_address)
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(
            request(ids=ids(600, number), max_tokens=500, ignore_eos=True)
        )
        next(stream)
        channel.close()
    eventually(own_cluster.held_nothing, 2, "nothing held")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_queue_longer_than_any_timeout() -> None:
    """Work that progresses ends by nothing but the client's deadline."""
    options = ("--disaggregate-from", "0", "--dtype", "float32", "--kernels", "torch")
    with serve("demo", *options, "--kv-cache-bytes", "512MiB") as running:

        def ask(seed: int) -> float:
            started_s = time.monotonic()
            message = request(ids=ids(1900, seed), max_tokens=2, ignore_eos=True)
            with running.client() as stub:
                answer = collect(stub.Generate(message, timeout=120))
            assert answer.finished is not None and answer.finished.timeline.prefill_instance
            return time.monotonic() - started_s

        with ThreadPoolExecutor(6) as pool:
            longest_s = max(pool.map(ask, range(6)))
        assert longest_s > 6, "the queue was too short to show anything"
        eventually(running.held_nothing, 3, "nothing held")
