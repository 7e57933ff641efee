"""Instances killed and stopped under real requests: the streams equal the undisturbed ones."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest

from protos import inference_pb2 as public
from tests.e2e.harness import (
    START_TIMEOUT_S,
    Cluster,
    Generated,
    collect,
    eventually,
    request,
    serve,
    title_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROMPT = "The history of the relay race begins with messengers. " * 12
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 48},
    {"temperature": 0.8, "seed": 7, "max_tokens": 48},
    {"temperature": 1.0, "seed": 8, "top_p": 0.9, "max_tokens": 48, "stop": ["e t"]},
]
"""Greedy, drawn, and drawn with a stop string."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    options = ("--prefill", "2", "--decode", "2", "--dtype", "float32", "--weights", "float32")
    with serve("demo", *options, "--disaggregate-from", "0") as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Generated]:
    return [cluster.generate(prompt=PROMPT, **way) for way in WAYS]


def victims(cluster: Cluster, role: str) -> list[int]:
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    return [p.pid for p in family if {"worker", role} <= set(title_of(p))]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "legs": {"type": "integer"}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
MORE_WAYS: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 9, "max_tokens": 32, "n": 2},
    {"temperature": 0.0, "max_tokens": 48, "logprobs": 2},
    {
        "temperature": 0.7,
        "seed": 11,
        "max_tokens": 48,
        "guided": public.GuidedDecoding(json_schema=json.dumps(SCHEMA)),
    },
]
"""Several answers, logprobs, and a schema; for the soak, which has the time."""


class Asked(threading.Thread):
    """One request, and the longest silence its client saw."""

    def __init__(self, cluster: Cluster, way: dict[str, Any]) -> None:
        super().__init__()
        self._cluster, self._way = cluster, way
        self.got: Generated | None = None
        self.longest_pause_s = 0.0
        self.start()

    def run(self) -> None:
        with self._cluster.client() as stub:
            self.got = collect(
                self._timed(stub.Generate(request(prompt=PROMPT, **self._way), timeout=60))
            )

    def _timed(self, stream: Any) -> Iterator[Any]:
        last_s = time.monotonic()
        for response in stream:
            now_s = time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, now_s - last_s)
            last_s = now_s
            yield response


def disturb(
    cluster: Cluster,
    role: str,
    how: signal.Signals,
    moment_s: float,
    ways: Sequence[dict[str, Any]] = WAYS,
) -> list[Asked]:
    """All ways at once; one instance is killed or stopped in the middle of it."""
    asked = [Asked(cluster, way) for way in ways]
    time.sleep(moment_s)
    victim = victims(cluster, role)[0]
    os.kill(victim, how)
    for each in asked:
        each.join(60)
    if how is signal.SIGSTOP:
        os.kill(victim, signal.SIGKILL)
    return asked


def check(asked: list[Asked], undisturbed: list[Generated]) -> None:
    for each, expected in zip(asked, undisturbed, strict=True):
        got = each.got
        assert got is not None, "the stream failed"
        assert got.answers == expected.answers
        if len(expected.answers) == 1:
            assert got.text == expected.text
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert got.finished is not None and expected.finished is not None
        assert got.finished.finish_reason == expected.finished.finish_reason
        assert got.finished.stop_reason == expected.finished.stop_reason
        assert got.finished.usage.output_tokens == expected.finished.usage.output_tokens
        assert each.longest_pause_s < 10


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stream_goes_on_token_for_token(
    cluster: Cluster, undisturbed: list[Generated], how: signal.Signals, role: str, seed: int
) -> None:
    """PAINS 9 and 10."""
    moment_s = random.Random(f"{how} {role} {seed}").uniform(0.0, 0.8)
    eventually(lambda: cluster.all_ready(4), START_TIMEOUT_S, "all instances")
    check(disturb(cluster, role, how, moment_s), undisturbed)
    eventually(cluster.held_nothing, 10, "everything free")
