"""Membership, from the instance's side: register, heartbeat, register again, say goodbye.

A router that restarts has forgotten us and says so at the next heartbeat; a router that is away
is tried again until it is back. Knows nothing of engines. Used by ``services.worker.app``.
"""

import asyncio
import logging
from collections.abc import Callable

import grpc

from protos import cluster_pb2, cluster_pb2_grpc
from services.runtime.certificates import NO_TLS, TlsFiles
from services.runtime.errors import FailedPrecondition, to_service_error
from services.runtime.lifecycle import Component
from services.runtime.server import open_channel, token_metadata

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
RETRY_S = 0.25
# What the router says when this instance does not belong: trying again cannot help.
REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED)


class Registration(Component):
    """Keeps one instance known to its router."""

    def __init__(
        self,
        router_address: str,
        token: str,
        instance_id: str,
        describe: Callable[[], cluster_pb2.RegisterRequest],
        load: Callable[[], cluster_pb2.InstanceLoad],
        cache_news: Callable[[int], cluster_pb2.CacheNews],
        tls: TlsFiles = NO_TLS,
    ) -> None:
        self._tls = tls
        self._router_address = router_address
        self._metadata = token_metadata(token)
        self._instance_id = instance_id
        self._describe = describe
        self._load = load
        self._cache_news = cache_news
        self._cache_sequence = 0
        self._channel: grpc.aio.Channel | None = None
        self._ended: asyncio.Task[None] | None = None
        self._registered = asyncio.Event()

    async def start(self) -> None:
        """Return when registered for the first time.

        Raises:
            FailedPrecondition: the router refused this instance; the message says why.
        """
        self._channel = open_channel(self._router_address, self._tls)
        self._ended = asyncio.create_task(self._keep(), name="registration")
        first = asyncio.create_task(self._registered.wait())
        await asyncio.wait({first, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if self._ended.done():
            self._ended.result()

    async def watch(self) -> None:
        assert self._ended is not None
        await asyncio.shield(self._ended)

    async def tell(self) -> None:
        """Tell the router how we are, now; a router that is away is told by the next heartbeat."""
        if self._registered.is_set():
            await self._heartbeat()

    async def renew(self) -> None:
        """Register again, as what we are now; returns when the router knows.

        Raises:
            FailedPrecondition: it refuses that.
        """
        if self._registered.is_set():
            await self._register()

    async def stop(self) -> None:
        if self._ended is not None:
            self._ended.cancel()
            await asyncio.gather(self._ended, return_exceptions=True)
        channel, self._channel = self._channel, None
        if channel is not None:
            await self._goodbye(channel)
            await channel.close()

    @property
    def _stub(self) -> cluster_pb2_grpc.ClusterStub:
        assert self._channel is not None
        return cluster_pb2_grpc.ClusterStub(self._channel)

    async def _keep(self) -> None:
        """Register and heartbeat for ever; ends only when the router refuses us."""
        while True:
            interval_s = await self._register()
            self._registered.set()
            while await self._heartbeat():
                await asyncio.sleep(interval_s)
            log.info("the router does not know this instance: registering again")

    async def _register(self) -> float:
        said = False
        while True:
            try:
                answer = await self._stub.Register(
                    self._describe(), metadata=self._metadata, timeout=CALL_TIMEOUT_S
                )
                return float(answer.heartbeat_interval_s)
            except grpc.aio.AioRpcError as error:
                if error.code() in REFUSALS:
                    raise FailedPrecondition(f"the router refused: {error.details()}") from error
                if not said:
                    log.info("waiting for the router: %s", to_service_error(error))
                    said = True
            await asyncio.sleep(RETRY_S)

    async def _heartbeat(self) -> bool:
        """Whether the router still knows us. A router that is away counts as one that does."""
        beat = cluster_pb2.HeartbeatRequest(
            instance_id=self._instance_id,
            load=self._load(),
            cache_news=self._cache_news(self._cache_sequence),
        )
        try:
            answer = await self._stub.Heartbeat(
                beat, metadata=self._metadata, timeout=CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            log.debug("heartbeat failed: %s", error.code().name)
            return True
        self._cache_sequence = answer.cache_sequence
        return bool(answer.known)

    async def _goodbye(self, channel: grpc.aio.Channel) -> None:
        request = cluster_pb2.DeregisterRequest(instance_id=self._instance_id)
        try:
            await cluster_pb2_grpc.ClusterStub(channel).Deregister(
                request, metadata=self._metadata, timeout=0.5
            )
        except grpc.aio.AioRpcError as error:
            # The router is gone already, or will notice the broken stream.
            log.debug("no goodbye: %s", error.code().name)
