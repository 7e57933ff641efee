"""``kvrelay drain``, ``undrain``, ``role``, ``restart`` and ``scale``: what an operator asks.

Finds an instance by the router's status and asks it on its internal port, with the cluster token.
Called by ``main``.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from protos import cluster_pb2, cluster_pb2_grpc
from services.cli.client import STATUS_TIMEOUT_S, cluster_status, connected, key_metadata
from services.runtime.certificates import TlsFiles
from services.runtime.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from services.runtime.server import cluster_token, connect, token_metadata
from services.runtime.settings import Role

CALL_S = 120.0
"""A role changes once what runs has ended."""
RESTART_S = 120.0
SCALE_S = 600.0
"""Models are loaded, and what runs on instances that go has their drain timeout."""
POLL_S = 0.1

Instances = list[dict[str, Any]]


def drain(address: str, instance: str, *, now: bool = False, undo: bool = False) -> None:
    """Raises: ServiceError or grpc.aio.AioRpcError: it was not asked, and why."""
    request = cluster_pb2.DrainRequest(now=now, undo=undo)
    asyncio.run(_ask_one(address, instance, lambda stub, **call: stub.Drain(request, **call)))


def change_role(address: str, instance: str, role: Role) -> None:
    """Raises: ServiceError or grpc.aio.AioRpcError: the role has not changed, and why."""
    request = cluster_pb2.SetRoleRequest(role=cluster_pb2.Role.ValueType(role.number))
    asyncio.run(_ask_one(address, instance, lambda stub, **call: stub.SetRole(request, **call)))


def restart(address: str, instances: Sequence[str]) -> None:
    """One after the other: each leaves, and whoever keeps the cluster starts another in its place.

    Args:
        instances: their ids; none: all.

    Raises:
        ServiceError or grpc.aio.AioRpcError: one did not come back, and why.
    """
    asyncio.run(_restart(address, instances))


def scale(address: str, counts: Mapping[Role, int]) -> None:
    """Ask whoever keeps the cluster for so many instances of these roles; wait until it is so.

    Raises:
        InvalidArgument: nothing was asked for.
        FailedPrecondition: nobody here can be asked.
        ServiceError or grpc.aio.AioRpcError: it is not so, and why.
    """
    if not counts:
        raise InvalidArgument("--prefill, --decode or --colocated", "say how many there should be")
    asyncio.run(_scale(address, counts))


async def _scale(address: str, counts: Mapping[Role, int]) -> None:
    request = cluster_pb2.ScaleRequest(**{role.value: count for role, count in counts.items()})
    async with connected(address) as channel:
        status = await cluster_pb2_grpc.StatusStub(channel).GetStatus(
            cluster_pb2.GetStatusRequest(), timeout=STATUS_TIMEOUT_S, metadata=key_metadata()
        )
    if not status.launcher:
        raise FailedPrecondition(
            "this cluster is kept by an orchestrator, not by kvrelay serve: scale it there"
        )
    metadata = token_metadata(cluster_token())
    channel = await connect(status.launcher)
    try:
        stub = cluster_pb2_grpc.LauncherStub(channel)
        await stub.Scale(request, metadata=metadata, timeout=SCALE_S)
    finally:
        await channel.close()


async def _restart(address: str, names: Sequence[str]) -> None:
    async with connected(address) as channel:
        here = (await cluster_status(channel))["instances"]
        chosen = [_find(here, name) for name in names] or here
        for instance in chosen:
            known = {each["instance_id"] for each in (await cluster_status(channel))["instances"]}
            async with _instance(instance["address"]) as (stub, call):
                await stub.Leave(cluster_pb2.LeaveRequest(), timeout=CALL_S, **call)
            new = await _successor(channel, instance, known)
            print(f"{instance['instance_id']} -> {new}", file=sys.stderr)


async def _successor(channel: Any, gone: dict[str, Any], known: set[str]) -> str:
    """The id of the instance that came for one that left."""
    try:
        async with asyncio.timeout(RESTART_S):
            while True:
                instances: Instances = (await cluster_status(channel))["instances"]
                here = {each["instance_id"]: each for each in instances}
                if gone["instance_id"] not in here:
                    for name, each in sorted(here.items()):
                        if name not in known and each["state"] == "ready":
                            return str(name)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise Unavailable(
            f"nobody came for {gone['instance_id']} within {RESTART_S:g} s: "
            "is something there that starts workers again?"
        ) from None


async def _ask_one(address: str, instance: str, ask: Callable[..., Awaitable[Any]]) -> None:
    async with connected(address) as channel:
        found = _find((await cluster_status(channel))["instances"], instance)
    async with _instance(found["address"]) as (stub, call):
        await ask(stub, timeout=CALL_S, **call)


@asynccontextmanager
async def _instance(address: str) -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    """A stub for an instance, and what every call to it takes."""
    metadata = token_metadata(cluster_token())
    channel = await connect(address, tls=_internal_tls())
    try:
        yield cluster_pb2_grpc.InstanceStub(channel), {"metadata": metadata}
    finally:
        await channel.close()


def _internal_tls() -> TlsFiles:
    """The internal certificates, as the environment names them."""
    named = ("CERT", "KEY", "CA", "NAME")
    return TlsFiles(*(os.environ.get(f"KVRELAY_INTERNAL_TLS_{each}", "") for each in named))


def _find(instances: Instances, name: str) -> dict[str, Any]:
    """Raises: NotFound: no such instance."""
    for each in instances:
        if each["instance_id"] == name:
            return each
    here = ", ".join(each["instance_id"] for each in instances) or "none"
    raise NotFound(f"no instance {name}; there are: {here}")
