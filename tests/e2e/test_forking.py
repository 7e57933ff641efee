"""Workers forked from one process: shared, killed, orphaned, and when it cannot start at all."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from engine.config import EngineConfig
from services.launch.forking import ForkingLauncher
from services.launch.place import LaunchError
from services.launch.processes import ChildProcess
from services.runtime.settings import Role, RouterConfig, WorkerConfig
from tests.e2e.harness import all_gone, title_of

pytestmark = pytest.mark.slow


@pytest.fixture
async def router(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The internal address of a router."""
    monkeypatch.setenv("KVRELAY_CLUSTER_TOKEN", "secret")
    config = RouterConfig(model=str(tiny_model), grpc_port=0, http_port=0, internal_port=0)
    child = await ChildProcess.start("router", config)
    yield child.addresses["internal"]
    child.kill()
    await child.died()


@pytest.fixture
async def launcher() -> AsyncIterator[ForkingLauncher]:
    launcher = ForkingLauncher()
    yield launcher
    await launcher.close()


def worker(model: Path | str, router: str, role: Role = Role.DECODE) -> WorkerConfig:
    engine = EngineConfig(kv_cache_bytes=1 << 20)
    return WorkerConfig(str(model), role, router, engine=engine)


def parent_of(child: ChildProcess) -> psutil.Process:
    parent = psutil.Process(child.pid).parent()
    assert parent is not None and title_of(parent) == ["kvrelay", "fork", "server"]
    return parent


async def test_workers_have_one_parent_and_die_alone(
    tiny_model: Path, router: str, launcher: ForkingLauncher
) -> None:
    first, second = await asyncio.gather(
        launcher.place("prefill-0", worker(tiny_model, router, Role.PREFILL)),
        launcher.place("decode-0", worker(tiny_model, router)),
    )
    assert parent_of(first) == parent_of(second)
    assert title_of(psutil.Process(second.pid)) == ["kvrelay", "worker", "decode", "decode-0"]
    assert os.getsid(first.pid) == first.pid, "a Ctrl-C at the terminal would reach it"
    os.kill(first.pid, signal.SIGKILL)
    async with asyncio.timeout(1):
        assert await first.died() == "killed by SIGKILL"
    assert second.addresses["grpc"]
    await second.stop(10.0)
    assert await second.died() == "exited with code 0 and no reason"
    again = await launcher.place("prefill-0", worker(tiny_model, router, Role.PREFILL))
    again.kill()
    await again.died()


async def test_workers_go_with_their_parent_and_the_next_finds_another(
    tiny_model: Path, router: str, launcher: ForkingLauncher
) -> None:
    child = await launcher.place("decode-0", worker(tiny_model, router))
    parent = parent_of(child)
    parent.kill()
    async with asyncio.timeout(2):
        assert await child.died() == "killed by SIGKILL"
    again = await launcher.place("decode-0", worker(tiny_model, router))
    assert parent_of(again) != parent
    await launcher.close()
    async with asyncio.timeout(2):
        assert await again.died() == "killed by SIGKILL", "its new parent has gone, too"


async def test_a_parent_that_is_stopped_keeps_nobody_alive(
    tiny_model: Path, router: str, launcher: ForkingLauncher
) -> None:
    child = await launcher.place("decode-0", worker(tiny_model, router))
    process = psutil.Process(child.pid)
    parent_of(child).suspend()
    child.kill()
    async with asyncio.timeout(2):
        await child.died()
    await launcher.close()
    assert all_gone([process])


async def test_a_model_that_cannot_be_read(launcher: ForkingLauncher) -> None:
    with pytest.raises(LaunchError, match=r"^decode-0: .*/nonexistent") as caught:
        await launcher.place("decode-0", worker("/nonexistent", "127.0.0.1:1"))
    assert "\n" not in str(caught.value)
    assert not psutil.Process().children()
