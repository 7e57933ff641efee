"""The child's side of ``processes``: ``python -m services.launch.child PARENT_PID TITLE...``.

A child never outlives its parent. On Linux the kernel kills it with the parent's death; it also
ends, anywhere, when its stdin does, which only the parent holds open. TITLE is for people who
read lists of processes.

Reads its config from stdin, says ``ready ...`` or ``failed REASON`` on stdout. Knows nothing of
clusters or restarts. Started by ``processes``; ``fork_server`` makes one without a start.
"""

import asyncio
import ctypes
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.worker.build import ReadModel

PR_SET_PDEATHSIG = 1


def share_fate(parent_pid: int) -> None:
    """Have the kernel end this process with its parent, where it can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)  # it died before we asked


def hold_lifeline() -> None:
    """End this process when stdin ends."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def serve_config(line: str, read: "ReadModel | None" = None) -> int:
    """Serve what ``line`` says until told to stop; the exit code. stdin is the lifeline.

    Args:
        read: of a worker that was forked: its model, in memory already.
    """
    from services.launch.service import ready_line, run_service
    from services.launch.transfer import read_config
    from services.runtime import journal
    from services.runtime.errors import to_service_error

    config = read_config(line)
    hold_lifeline()
    journal.configure()
    try:
        asyncio.run(run_service(config, lambda at: print(ready_line(at), flush=True), read))
    except Exception as error:
        print(f"failed {to_service_error(error)}", flush=True)
        return 1
    return 0


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    # Everything else is imported only after this, so that nothing can happen before.
    share_fate(int(arguments[0]))
    return serve_config(sys.stdin.readline())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
