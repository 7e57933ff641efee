"""Instances in one process, driven as a router would: no router involved."""

import asyncio
import secrets
from typing import Any

import grpc

from protos import cluster_pb2, cluster_pb2_grpc, worker_pb2_grpc
from protos import inference_pb2 as public
from protos import worker_pb2 as wire
from services.runtime.server import GrpcServer, open_channel, token_metadata
from services.worker.app import Worker

TOKEN = "a token"


class Registry(cluster_pb2_grpc.ClusterServicer):
    """The router's side of membership, that says yes to everything."""

    def __init__(self) -> None:
        self.registered: list[cluster_pb2.RegisterRequest] = []
        self.beats: list[cluster_pb2.HeartbeatRequest] = []
        self.gone: list[str] = []
        self.knows = True

    async def Register(self, request: Any, context: Any) -> Any:
        self.registered.append(request)
        self.knows = True
        return cluster_pb2.RegisterResponse(heartbeat_interval_s=0.05)

    async def Heartbeat(self, request: Any, context: Any) -> Any:
        self.beats.append(request)
        return cluster_pb2.HeartbeatResponse(known=self.knows)

    async def Deregister(self, request: Any, context: Any) -> Any:
        self.gone.append(request.instance_id)
        return cluster_pb2.DeregisterResponse()


class Leg:
    """One Run stream to one instance."""

    def __init__(self, method: Any, container: Any) -> None:
        self._call = method(metadata=token_metadata(TOKEN))
        self._container = container
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def say(self, **command: Any) -> None:
        await self._call.write(self._container(**command))

    async def _read(self) -> None:
        try:
            async for message in self._call:
                for event in message.events:
                    self.events.put_nowait(event)
        except grpc.aio.AioRpcError:
            return

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


class Pair:
    """Both instances, a leg to each, and what a router does with them."""

    def __init__(self, prefill: Worker, decode: Worker, registry: Registry) -> None:
        self.prefill, self.decode, self.registry = prefill, decode, registry
        self._channels = [open_channel(w.addresses.grpc) for w in (prefill, decode)]
        self.prefill_leg = Leg(
            worker_pb2_grpc.PrefillStub(self._channels[0]).Run, wire.PrefillCommand
        )
        self.decode_leg = Leg(worker_pb2_grpc.DecodeStub(self._channels[1]).Run, wire.DecodeCommand)

    async def start(
        self,
        ids: list[int],
        max_tokens: int = 8,
        handoff: bool = True,
        legs: str = "PD",
        **sampling_fields: Any,
    ) -> str:
        request_id, handoff_id = secrets.token_hex(4), secrets.token_bytes(16)
        fields = {"temperature": 0, "top_p": 1, "max_tokens": max_tokens, "ignore_eos": True}
        sampling = public.SamplingParams(**(fields | sampling_fields))
        request = wire.WorkRequest(request_id=request_id, prompt_token_ids=ids, sampling=sampling)
        if "D" in legs:
            await self.decode_leg.say(
                start=wire.StartDecode(request=request, handoff_id=handoff_id if handoff else b"")
            )
        if handoff and "P" in legs:
            await self.prefill_leg.say(
                start=wire.StartPrefill(
                    request=request,
                    handoff_id=handoff_id,
                    target_address=self.decode.addresses.grpc,
                    target_instance_id=self.decode.instance_id,
                )
            )
        return request_id

    async def answer(self, request_id: str) -> tuple[list[int], wire.DecodeEvent]:
        ids: list[int] = []
        while True:
            event = await asyncio.wait_for(self.decode_leg.events.get(), 20)
            assert event.request_id == request_id
            if not event.HasField("tokens"):
                return ids, event
            ids += event.tokens.token_ids

    async def answers(self, request_id: str, count: int) -> list[list[int]]:
        """The token ids of several answers to one request, each ended once, and all together."""
        ids: list[list[int]] = [[] for _ in range(count)]
        ended: list[int] = []
        while True:
            event = await asyncio.wait_for(self.decode_leg.events.get(), 20)
            match event.WhichOneof("event"):
                case "tokens":
                    ids[event.tokens.index] += event.tokens.token_ids
                case "choice_finished":
                    choice = event.choice_finished
                    assert choice.output_tokens == len(ids[choice.index])
                    ended.append(choice.index)
                case "finished":
                    assert sorted(ended) == list(range(count))
                    assert event.finished.output_tokens == sum(map(len, ids))
                    return ids
                case _:
                    raise AssertionError(event)

    async def nothing_held(self, within_s: float = 1.0) -> None:
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            loads = [w.load() for w in (self.prefill, self.decode)]
            if not any(
                m.blocks_held or m.requests_running or m.requests_waiting or m.handoffs_active
                for m in loads
            ):
                return
            assert asyncio.get_running_loop().time() < deadline, loads
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.prefill_leg.close()
        await self.decode_leg.close()
        for channel in self._channels:
            await channel.close()


def router_of(registry: Registry) -> GrpcServer:
    """What instances register with."""
    return GrpcServer(
        lambda server: cluster_pb2_grpc.add_ClusterServicer_to_server(registry, server),
        "127.0.0.1",
        0,
        token=TOKEN,
    )
