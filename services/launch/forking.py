"""Workers that are forked from one process, which has read their model once.

The other end of ``fork_server``. Weights are in memory once however many workers serve them, and
a worker that died is back as soon as it has a KV cache. A worker is a ``ChildProcess`` as any
other; only its birth and death are told by the fork server instead of the kernel. Where that one
dies, its workers die with it, and the next worker finds a new one.

Knows nothing of what a service does. ``ForkingLauncher`` is used by ``supervise``.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from dataclasses import replace
from typing import Any

from services.launch.fork_server import MAX_MESSAGE_BYTES
from services.launch.place import LaunchError
from services.launch.processes import ChildProcess, LocalLauncher
from services.launch.transfer import write_config
from services.runtime.settings import Role, WorkerConfig

TELL_S = 0.5
"""How long a fork server has to say how its child ended, before it counts as killed."""


def can_fork(device: str) -> bool:
    """Whether workers can share what another process has read: on Linux, and not on a GPU."""
    return sys.platform == "linux" and device != "cuda"


class ForkingLauncher:
    """Places workers as children of one fork server for each model and engine configuration."""

    def __init__(self) -> None:
        self._servers: dict[WorkerConfig, ForkServerProcess] = {}
        self._starting = asyncio.Lock()

    async def place(self, name: str, config: WorkerConfig) -> ChildProcess:
        try:
            server = await self._server(config)
            process = await server.fork(f"worker {config.role} {name}")
        except LaunchError as error:
            raise LaunchError(f"{name}: {error}") from None
        return await ChildProcess.adopt(name, process, config)

    def forget(self, name: str) -> None:
        """What has read the model stays, for the next."""

    async def close(self) -> None:
        for server in self._servers.values():
            await server.stop()

    async def _server(self, config: WorkerConfig) -> "ForkServerProcess":
        # All that the weights depend on.
        key = replace(
            WorkerConfig(config.model, Role.COLOCATED, "-"),
            engine=replace(config.engine, threads=1),
        )
        async with self._starting:
            server = self._servers.get(key)
            if server is None or server.is_gone:
                server = self._servers[key] = await ForkServerProcess.start(key)
            return server


class ForkServerProcess:
    """The fork server as its parent sees it. Made by ``start``."""

    def __init__(self, process: asyncio.subprocess.Process, orders: socket.socket) -> None:
        self._process = process
        self._orders = orders
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._forking = asyncio.Lock()
        self._children: dict[int, ForkedProcess] = {}
        self._listening = asyncio.create_task(self._listen(), name="fork server")

    @classmethod
    async def start(cls, config: WorkerConfig) -> "ForkServerProcess":
        """Start one and wait until it has read the model.

        Raises:
            LaunchError: it cannot; the reason is its own.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.launch.fork_server"),
                *(str(os.getpid()), str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # stdout is for our one line
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        server = cls(process, ours)
        try:
            server._say(config=write_config(config))
            answer = await server._answers.get()
            if "ready" not in answer:
                raise LaunchError(answer["failed"])
        except BaseException:
            await server.stop()
            raise
        return server

    @property
    def is_gone(self) -> bool:
        return self._listening.done()

    async def fork(self, name: str) -> "ForkedProcess":
        """A new process that knows nothing yet but its model.

        Raises:
            LaunchError: the fork server has died.
        """
        their_stdin, stdin = os.pipe()
        stdout, their_stdout = os.pipe()
        try:
            async with self._forking:
                self._say(their_stdin, their_stdout, start=name)
                answer = await self._answers.get()
                if "started" not in answer:
                    raise LaunchError(answer["failed"])
                child = self._children[answer["started"]] = ForkedProcess(answer["started"])
        except BaseException:
            os.close(stdin)
            os.close(stdout)
            raise
        finally:
            os.close(their_stdin)
            os.close(their_stdout)
        await child.connect(stdin, stdout)
        return child

    async def stop(self) -> None:
        """Idempotent. Children that still live end with it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._listening

    def _say(self, *descriptors: int, **message: Any) -> None:
        # One that is gone is noticed by the listener, which answers in its place.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._orders, [json.dumps(message).encode()], descriptors)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        with self._orders, contextlib.suppress(ConnectionResetError):
            while data := await loop.sock_recv(self._orders, MAX_MESSAGE_BYTES):
                message = json.loads(data)
                if "ended" in message:
                    self._children.pop(message["ended"]).told_end(message["code"])
                else:
                    self._answers.put_nowait(message)
        await self._process.wait()
        for child in self._children.values():
            child.told_end(-signal.SIGKILL)
        self._answers.put_nowait({"failed": "the process that had read the model died"})


class ForkedProcess:
    """A child of the fork server; a ``processes.Process``.

    Held by a descriptor of the process itself, so that it can be killed, and seen to be gone, when
    the fork server does not answer, and its pid is never taken for another's.
    """

    stdin: asyncio.StreamWriter | None = None
    stdout: asyncio.StreamReader | None = None

    def __init__(self, pid: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = pid
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._handle: int | None = None
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return  # it has ended already, and the fork server is about to say how
        self._loop.add_reader(self._handle, self._is_gone)

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def connect(self, stdin: int, stdout: int) -> None:
        """Take over our ends of its pipes."""
        self.stdout = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(self.stdout)
        await self._loop.connect_read_pipe(lambda: protocol, os.fdopen(stdout, "rb"))
        transport, flow = await self._loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(stdin, "wb")
        )
        self.stdin = asyncio.StreamWriter(transport, flow, None, self._loop)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        if self._handle is not None:
            signal.pidfd_send_signal(self._handle, number)

    def told_end(self, code: int) -> None:
        """The fork server says so."""
        if not self._ended.done():
            self._ended.set_result(code)
        if self.stdin is not None:
            self.stdin.close()
        self._let_go()

    def _is_gone(self) -> None:
        """It is; how it ended, its parent knows, unless that one is stopped itself."""
        self._let_go()
        self._loop.call_later(TELL_S, self.told_end, -signal.SIGKILL)

    def _let_go(self) -> None:
        if self._handle is not None:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None


def local_launcher(device: str) -> ForkingLauncher | LocalLauncher:
    """What places workers on this machine."""
    return ForkingLauncher() if can_fork(device) else LocalLauncher()
