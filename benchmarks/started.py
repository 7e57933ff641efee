"""A command of ``kvrelay`` as a process of its own, for benchmarks that need a cluster.

Knows the line that says where it answers; nothing of what is measured.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Started:
    """Where it answers, ``host:port`` each; empty where it does not."""

    pid: int
    grpc: str
    http: str
    internal: str = ""


@contextlib.contextmanager
def started(command: str, model: str, *options: str) -> Iterator[Started]:
    """``kvrelay COMMAND MODEL`` on free ports, until the block ends.

    Logs errors alone, unless the environment says otherwise: a line a request would be measured.

    Raises:
        SystemExit: it does not start; why, is on stderr.
    """
    arguments = [command, model, "--grpc-port", "0", "--http-port", "0", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli.main", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={"KVRELAY_LOG_LEVEL": "error", **os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        if not ready.startswith("ready "):
            raise SystemExit(f"kvrelay {command} did not start")
        yield Started(process.pid, **dict(word.split("=", 1) for word in ready.split()[1:]))
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
