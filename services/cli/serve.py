"""A whole cluster under one command: from options to a plan, up, and down in order.

    1  plan    which workers, how many threads each
    2  up      the router, then the workers; progress on stderr when somebody watches
    3  work    serve until a signal (``serve``), or one answer (``demo``)
    4  down    on the first signal drain, on the second at once

Knows nothing of requests. Used by ``kvrelay serve`` and ``kvrelay demo``.
"""

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console

from engine.config import EngineConfig
from services.launch.forking import local_launcher
from services.launch.place import Launcher
from services.launch.scaling import ScalingService
from services.launch.service import ready_line
from services.launch.supervise import Cluster, ClusterPlan
from services.runtime import journal
from services.runtime.errors import InvalidArgument
from services.runtime.lifecycle import StopSignals
from services.runtime.server import TOKEN_VARIABLE, GrpcServer, cluster_token
from services.runtime.settings import Role, RouterConfig, WorkerConfig

LOOPBACK = "127.0.0.1"
DRAIN_S = 5.0
"""What requests in flight are given after the first Ctrl-C."""

Work = Callable[[Mapping[str, str]], Awaitable[None]]
"""What is done with a cluster that is up; told the router's addresses."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Instances by role. None at all means one prefill and one decode instance."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0

    def roles(self) -> tuple[Role, ...]:
        """One entry an instance.

        Raises:
            InvalidArgument: such a cluster could not answer.
        """
        for role in Role:
            if getattr(self, role) < 0:
                raise InvalidArgument(f"--{role}", "must not be negative")
        if not (self.prefill or self.decode or self.colocated):
            return (Role.PREFILL, Role.DECODE)
        if not (self.decode or self.colocated):
            raise InvalidArgument("--decode", "prefill alone answers nobody: add --decode 1")
        return tuple(role for role in Role for _ in range(getattr(self, role)))


def num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def make_plan(
    router: RouterConfig, roles: tuple[Role, ...], engine: EngineConfig, transport: str
) -> ClusterPlan:
    """The plan of a cluster on this machine; checked, so that nothing starts on a wrong option.

    Raises:
        InvalidArgument: names the option.
    """
    router = dataclasses.replace(router, internal_port=0, drain_timeout_s=DRAIN_S)
    router.validate()

    def worker_for(role: str, address: str) -> WorkerConfig:
        return WorkerConfig(
            model=router.model,
            role=Role(role),
            router=address,
            engine=engine,
            transport=transport,
            insecure=router.insecure,
            internal_tls_cert=router.internal_tls_cert,
            internal_tls_key=router.internal_tls_key,
            internal_tls_ca=router.internal_tls_ca,
            internal_tls_name=router.internal_tls_name,
        )

    worker_for(roles[0], "127.0.0.1:1").validate()
    return ClusterPlan(router, worker_for, roles)


def internal_host(launcher: str, ray_address: str, insecure: bool) -> str:
    """Where the router listens for instances: on loopback, unless they are on other machines.

    Raises:
        InvalidArgument: nothing else was allowed, or no other machine is asked for.
    """
    if launcher != "ray" or not ray_address:
        return LOOPBACK
    if not insecure:
        raise InvalidArgument(
            "--ray-address",
            "between machines there is no encryption: add --insecure if that is meant",
        )
    return "0.0.0.0"


def launcher_by_name(
    name: str, plan: ClusterPlan, engine: EngineConfig, ray_address: str = ""
) -> Callable[[], Launcher]:
    """What makes the launcher, once it is wanted; making one may raise LaunchError.

    Raises:
        InvalidArgument: no such launcher.
    """
    if name == "local":
        return lambda: local_launcher(engine.device)
    if name == "ray":
        from services.launch.actors import RayLauncher

        gpus = 1 if engine.device == "cuda" else 0
        near = plan.neighbours()
        return lambda: RayLauncher.connect(near, engine.threads, gpus, ray_address)
    raise InvalidArgument("--launcher", f"{name!r} is none of local, ray")


def run_with_cluster(plan: ClusterPlan, launch: Callable[[], Launcher], work: Work) -> None:
    """Bring a cluster up, do ``work`` with it, stop it. A signal ends it early, and well.

    Raises:
        LaunchError: it could not start or be kept.
        Exception: what ``work`` raised.
    """
    # Services of one cluster share the secret through their environment.
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(32))
    os.environ.setdefault(journal.LEVEL_VARIABLE, "warning")
    journal.configure()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        launcher = launch()
        asyncio.run(_run(plan, launcher, work))
    except KeyboardInterrupt:
        return  # a signal from before the event loop took them over: nothing had started


def serve_until_stopped(plan: ClusterPlan, launch: Callable[[], Launcher]) -> None:
    """Keep a cluster up until a signal; stdout says once that it is.

    Raises:
        LaunchError: it could not start or be kept.
    """
    stdout = sys.stdout

    async def announce(addresses: Mapping[str, str]) -> None:
        public = {name: addresses[name] for name in ("grpc", "http")}
        print(ready_line(public), file=stdout, flush=True)
        await asyncio.Event().wait()

    # Libraries print, Ray for one; stdout belongs to the one line.
    with contextlib.redirect_stdout(sys.stderr):
        run_with_cluster(plan, launch, announce)


async def _run(plan: ClusterPlan, launcher: Launcher, work: Work) -> None:
    with StopSignals() as signals, _progress(plan) as on_up:
        scaling = ScalingService()
        server = GrpcServer(scaling.mount, LOOPBACK, 0, token=cluster_token())
        await server.start()
        router = dataclasses.replace(plan.router, launcher=server.address)
        cluster = Cluster(dataclasses.replace(plan, router=router), launcher, on_up=on_up)
        drain_s = 0.0
        try:
            scaling.serve(cluster)
            await _until(signals.stop, _up_and_work(cluster, work))
            drain_s = DRAIN_S
        finally:
            await server.stop()
            await _stop(cluster, drain_s, signals.hurry)


async def _up_and_work(cluster: Cluster, work: Work) -> None:
    addresses = await cluster.start()
    watching = asyncio.create_task(cluster.watch())
    working = asyncio.ensure_future(work(addresses))
    try:
        done, _ = await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for each in (watching, working):
            each.cancel()
        await asyncio.gather(watching, working, return_exceptions=True)


async def _until(stop: asyncio.Event, job: Awaitable[None]) -> None:
    """Await ``job``, but no longer than until ``stop``; raises what it raised."""
    task = asyncio.ensure_future(job)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, stopped):
            each.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


async def _stop(cluster: Cluster, drain_s: float, hurry: asyncio.Event) -> None:
    stopping = asyncio.create_task(cluster.stop(drain_s))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        cluster.kill()
    hurried.cancel()
    await stopping


@contextlib.contextmanager
def _progress(plan: ClusterPlan) -> Iterator[Callable[[str], None]]:
    """A spinner that says what is still awaited; nothing when nobody watches."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda name: None
        return
    waiting = ["router", *(name for name, _ in plan.names())]
    spinner = console.status(f"starting {', '.join(waiting)}")

    def on_up(name: str) -> None:
        if name in waiting:
            waiting.remove(name)
        if waiting:
            spinner.update(f"starting {', '.join(waiting)}")
        else:
            spinner.stop()

    with spinner:
        yield on_up
