"""Says whether the kernels are tested, and sees to it where this process cannot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.ops_gpu.conftest import HAS_GPU, HAS_TRITON, IS_TOO_LATE

ROOT = Path(__file__).resolve().parents[3]
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason="triton is not installed: pip install 'kvrelay[gpu]'"
)

if IS_TOO_LATE:

    @pytest.mark.slow
    @pytest.mark.timeout(3600)
    def test_the_kernels_in_a_process_of_their_own() -> None:
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", str(Path(__file__).parent), "-p", "no:cacheprovider"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr

else:

    @needs_triton
    def test_kernels_run_on_a_gpu_or_in_the_interpreter() -> None:
        import triton

        assert HAS_GPU or triton.knobs.runtime.interpret


def test_only_the_kernels_import_triton() -> None:
    """It is an optional dependency: a runner on the CPU never asks for it."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import engine.runner, engine.ops.gpu.configs, engine.ops.gpu.prepare"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
