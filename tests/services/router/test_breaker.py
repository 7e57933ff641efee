"""An instance that fails again and again is kept away from, tried again, and forgiven."""

from typing import Any

import pytest

from protos import worker_pb2 as wire
from services.router.breaker import FAILURES_IN_A_ROW, FIRST_OPEN_S, MAX_OPEN_S, Breakers
from services.runtime.settings import Role
from tests.services.router.conftest import StartRouter
from tests.services.router.fake_worker import FakeWorker, Script
from tests.services.router.harness import collect, generate_request


def fail(breakers: Breakers, times: int, now_s: float = 0.0) -> None:
    for _ in range(times):
        breakers.failed(["a"], now_s)


def test_it_opens_after_failures_in_a_row() -> None:
    breakers = Breakers()
    fail(breakers, FAILURES_IN_A_ROW - 1)
    assert not breakers.open(0.0)
    breakers.succeeded(["a", "b"])
    fail(breakers, FAILURES_IN_A_ROW - 1)
    assert not breakers.open(0.0), "they were not in a row"
    fail(breakers, 1)
    assert breakers.open(0.0) == {"a"}
    assert not breakers.open(FIRST_OPEN_S)


def test_a_failed_probe_doubles_the_while_up_to_a_limit() -> None:
    breakers, now_s, whiles = Breakers(), 0.0, []
    fail(breakers, FAILURES_IN_A_ROW)
    for _ in range(8):
        open_s = 0.0
        while breakers.open(now_s + open_s):
            open_s += 0.5
        whiles.append(open_s)
        now_s += open_s
        fail(breakers, 1, now_s)
    assert whiles[:4] == [FIRST_OPEN_S * 2**n for n in range(4)]
    assert whiles[-1] == MAX_OPEN_S


def test_late_failures_of_one_trouble_are_one_trouble() -> None:
    breakers = Breakers()
    fail(breakers, 50)
    assert not breakers.open(FIRST_OPEN_S)


def test_who_left_is_forgotten() -> None:
    breakers = Breakers()
    fail(breakers, FAILURES_IN_A_ROW)
    breakers.keep_only(["b"])
    assert not breakers.open(0.0)


@pytest.mark.parametrize("num_requests", [12])
async def test_a_failing_instance_is_not_a_black_hole(
    start_router: StartRouter, num_requests: int
) -> None:
    """It is idle, so it would be chosen for everything."""
    cluster = await start_router(decode=1)
    failure: Any = wire.WorkFailed(code=13, message="a bug")
    bad = await cluster.add(FakeWorker(Role.DECODE, Script(fail_after=0, failure=failure)))
    for _ in range(num_requests):
        got = await collect(cluster.stub.Generate(generate_request(max_tokens=2), timeout=10))
        assert got.finished is not None
    assert len(bad.starts) <= FAILURES_IN_A_ROW
