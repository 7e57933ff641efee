"""These tests run the kernels on a GPU where there is one, else in triton's interpreter.

The interpreter must be chosen before triton is first imported, for the whole process. Where other
tests have imported it already (``transformers`` does), these run in a process of their own, from
``test_installed``. Compiling is tried in a child without the interpreter: the two do not go
together.

``make test-kernels`` sets KVRELAY_KERNEL_GRID and runs every combination; otherwise a sample runs.
"""

import importlib.util
import os
import sys

import torch

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_TOO_LATE = not HAS_GPU and "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"

if not HAS_TRITON or IS_TOO_LATE:
    collect_ignore_glob = ["test_[!i]*.py"]
elif not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

    from tests.engine.ops_gpu.interpreter import mend_bfloat16, mend_loop_bounds

    mend_bfloat16()
    mend_loop_bounds()
