"""Services as child processes of this one.

A child is ``python -m services.launch.child``. It gets its config as one line on its stdin and
answers with one line on its stdout: ``ready name=host:port ...`` or ``failed REASON``; a
``failed`` line may also come later, as its last word. Its stdin stays open for as long as this
process lives (see ``child``), its stderr is ours. It leads a session of its own, so a Ctrl-C at
the terminal reaches only this process, which then stops its children in order.

Knows nothing of what a service does. ``LocalLauncher`` is used by ``supervise`` where workers
cannot be forked (``forking``), and so is ``ChildProcess`` itself for the router, everywhere.
"""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from typing import Protocol

from services.launch.place import LaunchError
from services.launch.transfer import Config, write_config
from services.runtime.settings import WorkerConfig


class Process(Protocol):
    """What is asked of a process; ``asyncio.subprocess.Process`` is one."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> asyncio.StreamWriter | None: ...
    @property
    def stdout(self) -> asyncio.StreamReader | None: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def send_signal(self, signal: int, /) -> None: ...


class ChildProcess:
    """One service in a process of its own. Made by ``start`` or ``adopt``."""

    def __init__(self, name: str, process: Process) -> None:
        self._name = name
        self._process = process
        self._addresses: dict[str, str] = {}
        self._last_word = ""
        self._told = asyncio.Event()  # it is ready, or said why not, or its stdout has ended
        self._listening = asyncio.create_task(self._listen(), name=f"stdout of {name}")

    @classmethod
    async def start(cls, name: str, config: Config) -> "ChildProcess":
        """Start a service and wait until it is ready.

        Raises:
            LaunchError: it ended instead; the reason is its own.
        """
        title = ["worker", config.role] if isinstance(config, WorkerConfig) else ["router"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.launch.child", str(os.getpid()), *title, name),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
        )
        return await cls.adopt(name, process, config)

    @classmethod
    async def adopt(cls, name: str, process: Process, config: Config) -> "ChildProcess":
        """Tell a new process what to serve and wait until it is ready.

        Raises:
            LaunchError: it ended instead; the reason is its own.
        """
        child = cls(name, process)
        try:
            await child._send(write_config(config))
            await child._told.wait()
            if not child._addresses:
                raise LaunchError(f"{name}: {await child.died()}")
        except BaseException:
            child.kill()
            await child.died()
            raise
        return child

    @property
    def name(self) -> str:
        return self._name

    @property
    def addresses(self) -> Mapping[str, str]:
        return self._addresses

    @property
    def pid(self) -> int:
        return self._process.pid

    async def died(self) -> str:
        code = await self._process.wait()
        await self._listening
        if self._last_word:
            return self._last_word
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with code {code} and no reason"

    async def stop(self, grace_s: float) -> None:
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        self.kill()
        await self.died()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # A process that has been waited for is not signalled: its pid may be another's by now.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        # A child that died before it read its config has its reason on stdout.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(line.encode() + b"\n")
            await self._process.stdin.drain()

    async def _listen(self) -> None:
        """Read stdout to its end, so that the child never blocks on it."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            word, _, rest = line.decode(errors="replace").strip().partition(" ")
            if word == "ready":
                self._addresses = dict(pair.split("=", 1) for pair in rest.split())
                self._told.set()
            elif word == "failed":
                self._last_word = rest
        self._told.set()


class LocalLauncher:
    """Places workers as child processes on this machine."""

    async def place(self, name: str, config: WorkerConfig) -> ChildProcess:
        return await ChildProcess.start(name, config)

    def forget(self, name: str) -> None:
        """Nothing is kept for a process that has gone."""

    async def close(self) -> None:
        """Nothing to give back: processes are all there is."""
