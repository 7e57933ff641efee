"""Time that runs faster, for tests that wait for leases."""

import time
from collections.abc import Callable

import pytest

from kvtransfer import sweep


def fast_clock() -> float:
    """Ten seconds a second: leases end within half a second."""
    return time.monotonic() * 10


@pytest.fixture
def fast_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    monkeypatch.setattr(sweep, "SWEEP_S", 0.02)
    return fast_clock
