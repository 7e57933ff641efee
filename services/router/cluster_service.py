"""The internal face: instances register and send heartbeats here; anybody may ask for the status.

Translates messages; the rules are in ``membership``. Mounted by ``app``.
"""

from typing import Any

import grpc

from engine.kv.journal import KEY_BYTES, CacheNews
from kvtransfer.layout import DTYPE_BYTES, KvLayout
from protos import cluster_pb2, cluster_pb2_grpc
from services.router.fleet import Fleet
from services.router.membership import HEARTBEAT_INTERVAL_S, Instance, InstanceView, Load
from services.runtime.errors import InvalidArgument, ServiceError
from services.runtime.settings import Role

CONNECT_WAIT_S = 1.5
"""Shorter than instances wait for the answer to Register."""
_LOAD_FIELDS = tuple(Load.__slots__)
_LAYOUT_FIELDS = tuple(KvLayout.__slots__)


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    """Registration of instances."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def Register(
        self, request: cluster_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> cluster_pb2.RegisterResponse:
        try:
            self._fleet.register(_instance(request), _load(request.load))
        except ServiceError as error:
            await context.abort(error.codes.grpc, str(error))
        # An instance that says it is ready must be one that requests can be placed on.
        await self._fleet.connected(request.instance_id, CONNECT_WAIT_S)
        return cluster_pb2.RegisterResponse(heartbeat_interval_s=HEARTBEAT_INTERVAL_S)

    async def Heartbeat(
        self, request: cluster_pb2.HeartbeatRequest, context: grpc.aio.ServicerContext
    ) -> cluster_pb2.HeartbeatResponse:
        news = _news(request.cache_news) if request.HasField("cache_news") else None
        known = self._fleet.heartbeat(request.instance_id, _load(request.load), news)
        next_sequence = self._fleet.cache.next_sequence(request.instance_id)
        return cluster_pb2.HeartbeatResponse(known=known, cache_sequence=next_sequence)

    async def Deregister(
        self, request: cluster_pb2.DeregisterRequest, context: grpc.aio.ServicerContext
    ) -> cluster_pb2.DeregisterResponse:
        self._fleet.deregister(request.instance_id)
        return cluster_pb2.DeregisterResponse()


class StatusService(cluster_pb2_grpc.StatusServicer):
    """Who is there and how they are."""

    def __init__(self, model: str, fleet: Fleet, launcher: str = "") -> None:
        self._model = model
        self._fleet = fleet
        self._launcher = launcher

    async def GetStatus(
        self, request: cluster_pb2.GetStatusRequest, context: Any
    ) -> cluster_pb2.GetStatusResponse:
        views = self._fleet.snapshot().instances
        return cluster_pb2.GetStatusResponse(
            model=self._model,
            instances=[_status(view) for view in views],
            launcher=self._launcher,
        )


def _instance(request: cluster_pb2.RegisterRequest) -> Instance:
    """Raises: InvalidArgument: names the field."""
    for name in ("instance_id", "address", "model", "model_digest"):
        if not getattr(request, name):
            raise InvalidArgument(name, "is empty")
    for name in ("max_context", "max_sequence_tokens"):
        if getattr(request, name) < 2:
            raise InvalidArgument(name, "leaves no room for a prompt and an answer")
    layout = KvLayout(**{name: getattr(request.kv_layout, name) for name in _LAYOUT_FIELDS})
    if layout.dtype not in DTYPE_BYTES:
        raise InvalidArgument("kv_layout.dtype", f"{layout.dtype!r} is unknown")
    return Instance(
        instance_id=request.instance_id,
        role=Role.from_number(request.role),
        address=request.address,
        metrics_address=request.metrics_address,
        model=request.model,
        model_digest=request.model_digest,
        kv_layout=layout,
        max_context=request.max_context,
        max_sequence_tokens=request.max_sequence_tokens,
        max_gap_s=request.max_gap_s,
    )


def _news(message: cluster_pb2.CacheNews) -> CacheNews:
    return CacheNews(
        message.next_sequence, message.is_whole, _keys(message.stored), _keys(message.removed)
    )


def _keys(joined: bytes) -> tuple[bytes, ...]:
    return tuple(joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES))


def _load(message: cluster_pb2.InstanceLoad) -> Load:
    return Load(**{name: getattr(message, name) for name in _LOAD_FIELDS})


def _status(view: InstanceView) -> cluster_pb2.InstanceStatus:
    load = {name: getattr(view.load, name) for name in _LOAD_FIELDS}
    return cluster_pb2.InstanceStatus(
        instance_id=view.instance.instance_id,
        role=cluster_pb2.Role.ValueType(view.instance.role.number),
        address=view.instance.address,
        state=view.state.value,
        load=cluster_pb2.InstanceLoad(**load),
        metrics_address=view.instance.metrics_address,
    )
