"""A process that reads a model once and forks the workers that serve it.

``python -m services.launch.fork_server PARENT_PID FD``; FD is its end of a socket pair that keeps
message boundaries. All messages are one line of JSON:

    1  in   {"config": ...}                      which model, read how
    2  out  {"ready": true} or {"failed": ...}   the weights are in memory, packed
    3  in   {"start": name}, with two file descriptors: the child's stdin and stdout
    4  out  {"started": pid}
    5  out  {"ended": pid, "code": ...}          as ``subprocess`` counts: -9 is SIGKILL

A child has the weights and every imported module as its parent's pages: huge pages stay huge, and
memory is there once however many workers run. It starts as fast as it can lay out its KV cache.
From its fork on, it is what ``child`` makes of it.

Single-threaded for its whole life, as a fork copies only the thread that calls it: it imports
gRPC and asyncio, but runs neither. Ends with its parent; its children end with it. Started by
``forking``, by nobody else.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from services.launch.child import serve_config, share_fate

if TYPE_CHECKING:
    from services.worker.build import ReadModel

MAX_MESSAGE_BYTES = 1 << 16


class ForkServer:
    """The loop: orders in, deaths out."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._alive: set[int] = set()
        # A death must wake the select below: Python's own handler writes to this pipe.
        self._deaths, wake = os.pipe()
        os.set_blocking(wake, False)
        self._wake = wake

    def run(self) -> None:
        """Returns when the parent has closed its end."""
        message, _ = self._receive()
        if message is None:
            return
        read = self._read(message["config"])
        if read is None:
            return
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        # What is here now is never collected, so that no collector touches shared pages.
        gc.collect()
        gc.freeze()
        self._say(ready=True)
        while True:
            sources: list[socket.socket | int] = [self._orders, self._deaths]
            ready, _, _ = select.select(sources, [], [])
            if self._deaths in ready:
                os.read(self._deaths, 4096)
                self._reap()
            if self._orders in ready and not self._obey(read):
                return

    def _read(self, line: str) -> "ReadModel | None":
        from services.launch.transfer import read_config
        from services.runtime import journal
        from services.runtime.errors import to_service_error
        from services.runtime.settings import WorkerConfig
        from services.worker.build import read_model

        journal.configure()
        try:
            config = read_config(line)
            assert isinstance(config, WorkerConfig)
            read = read_model(config.model, config.engine)
            import services.launch.service
            import services.worker.app  # noqa: F401, imported once for all children
        except Exception as error:
            self._say(failed=str(to_service_error(error)))
            return None
        return read

    def _obey(self, read: "ReadModel") -> bool:
        message, descriptors = self._receive()
        if message is None:
            return False
        self._say(started=self._fork(message["start"], descriptors, read))
        return True

    def _fork(self, name: str, descriptors: list[int], read: "ReadModel") -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(name, parent, descriptors, read)
        self._alive.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        return pid

    def _become(
        self, name: str, parent: int, descriptors: list[int], read: "ReadModel"
    ) -> NoReturn:
        """In the child: leave everything of the parent's behind but memory."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in (self._deaths, self._wake, self._orders.fileno()):
                os.close(number)
            os.setsid()
            share_fate(parent)
            for target, descriptor in enumerate(descriptors):
                os.dup2(descriptor, target)
                os.close(descriptor)
            _set_title(f"kvrelay {name}")
            code = serve_config(sys.stdin.readline(), read)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            # Not sys.exit: this stack belongs to the parent.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        for pid in tuple(self._alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._alive.discard(pid)
                self._say(ended=pid, code=os.waitstatus_to_exitcode(status))

    def _receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        data, descriptors, _, _ = socket.recv_fds(self._orders, MAX_MESSAGE_BYTES, 2)
        return (json.loads(data) if data else None), descriptors

    def _say(self, **message: Any) -> None:
        self._orders.send(json.dumps(message).encode())


def _set_title(title: str) -> None:
    """For people who read lists of processes."""
    import setproctitle

    setproctitle.setproctitle(title)


def single_threaded() -> None:
    """Keep libraries from starting threads here; children choose for themselves."""
    import torch

    torch.set_num_threads(1)


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    share_fate(int(arguments[0]))
    _set_title("kvrelay fork server")
    single_threaded()
    with socket.socket(fileno=int(arguments[1])) as orders:
        ForkServer(orders).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
