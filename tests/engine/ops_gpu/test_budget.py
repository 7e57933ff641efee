"""The committed budget is what the compiler says, and every kernel fits every chip."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernel_budget import BUDGET, LIMITS, Use, objections, occupancy
from engine.ops.gpu.configs import CHIPS
from tests.engine.ops_gpu.cases import IS_WHOLE_GRID

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_budget_holds(tmp_path: Path) -> None:
    """Compiles a sample (all in ``make test-kernels``) for four chips, with no GPU."""
    every = 1 if IS_WHOLE_GRID else 31
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    # The compiler and the interpreter do not share a process.
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernel_budget", "--check", str(every)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert BUDGET.exists()


def test_every_chip_has_limits() -> None:
    assert CHIPS.keys() == LIMITS.keys()


@pytest.mark.parametrize(
    ("chip", "use", "expected"),
    [
        # 64 registers a thread: 65536 / (64 * 32) = 32 warps of 64.
        ("sm_90", Use(4, 64, 0, 0, 0), 0.5),
        # Four programs of 50 KiB and one reserved fit 228 KiB.
        ("sm_90", Use(4, 32, 0, 50 * 1024, 0), 0.25),
        # 512 columns of tensor memory hold two programs.
        ("sm_100", Use(8, 32, 0, 0, 256), 0.25),
        # 32 programs of one warp, however small.
        ("sm_80", Use(1, 16, 0, 0, 0), 0.5),
        # 512 registers a lane hold four waves of 128, of eight.
        ("gfx942", Use(4, 128, 0, 0, 0), 0.5),
        ("gfx942", Use(4, 32, 0, 40000, 0), 0.125),
    ],
)
def test_occupancy(chip: str, use: Use, expected: float) -> None:
    assert occupancy(CHIPS[chip], use) == expected


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (Use(4, 100, 8, 0, 0), "spills 8 bytes"),
        (Use(4, 100, 0, 240000, 0), "240000 bytes of shared memory"),
        (Use(4, 100, 0, 0, 513), "513 columns"),
        (Use(4, 300, 0, 0, 0), "300 registers"),
    ],
)
def test_what_does_not_fit_is_said(use: Use, said: str) -> None:
    assert any(said in objection for objection in objections(CHIPS["sm_90"], use))


def test_what_fits_is_not_objected_to() -> None:
    assert objections(CHIPS["sm_90"], Use(8, 168, 0, 98560, 0)) == []
