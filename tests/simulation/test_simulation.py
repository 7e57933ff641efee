"""Schedules by seed, what must hold in them, and that a product with a fault would be caught."""

import asyncio
import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.target import TargetHandoff
from services.prefill.service import PrefillService
from services.router import attempts
from services.router.link import Link
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.runs import Report, run_seed

FEW, MANY = 400, 20_000
"""Runs of every test session, and of one that has some minutes."""
CATCH_WITHIN = 400


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Instances that die are logged, and here many do."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _failed(seed: int) -> Report | None:
    logging.disable(logging.CRITICAL)
    report = run_seed(seed)
    return report if report.wrong is not None else None


def test_every_promise_holds_in_every_schedule() -> None:
    for seed in range(FEW):
        report = run_seed(seed)
        assert report.wrong is None, report.told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_promise_holds_in_many_schedules() -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count()) as pool:
        reports = pool.imap_unordered(_failed, range(FEW, MANY), chunksize=100)
        wrong = [report for report in reports if report is not None]
    assert not wrong, "\n\n".join(report.told for report in wrong[:3])


def test_a_run_is_a_function_of_its_seed() -> None:
    """Also in another process, where strings hash differently."""
    seeds = range(20)
    here = [run_seed(seed).log for seed in seeds]
    assert here == [run_seed(seed).log for seed in seeds]
    for seed in (0, 1, 2, 3):
        said = subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seed", str(seed)],
            env=os.environ | {"PYTHONHASHSEED": "7"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        assert said.stdout.splitlines()[1:] == list(here[seed])


async def _at_once(*_: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (TargetHandoff, "landed", _at_once),
        (PrefillService, "_release", _at_once),
        (Link, "stop", lambda link, request_id: link.done(request_id)),
        (attempts, "verdict", lambda history, failure, now_s: failure.error),
    ],
    ids=["decode before all has landed", "keep blocks", "stop nobody", "heal nothing"],
)
def test_a_product_with_a_fault_is_caught(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, broken: Any
) -> None:
    monkeypatch.setattr(where, name, broken)
    assert any(run_seed(seed).wrong for seed in range(CATCH_WITHIN))


def test_a_process_that_is_stopped_or_dead_does_nothing() -> None:
    loop, heard = VirtualLoop(), list[tuple[str, float]]()

    async def tick(process: Process) -> None:
        try:
            while True:
                await asyncio.sleep(1)
                heard.append((process.name, loop.time()))
        finally:
            heard.append((process.name, -1))

    stopped, dead = Process(loop, "stopped"), Process(loop, "dead")
    for process in (stopped, dead):
        process.spawn(tick(process))
    loop.call_at(1.5, stopped.stop)
    loop.call_at(1.5, dead.kill)
    loop.call_at(4.2, stopped.resume)
    loop.run_until_complete(asyncio.sleep(5.5))
    assert heard == [("stopped", 1), ("dead", 1), ("stopped", 4.2), ("stopped", 5.2)]
    for process in (stopped, dead):
        process.bury()
    loop.run_until_complete(asyncio.sleep(0))
    assert heard[-2:] == [("stopped", -1), ("dead", -1)]
    loop.close()


def test_a_deadlock_is_an_error() -> None:
    loop = VirtualLoop()
    forever = loop.create_future()
    with pytest.raises(RuntimeError, match="everybody waits for somebody"):
        loop.run_until_complete(forever)
    loop.close()
