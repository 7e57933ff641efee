"""What an operator may ask of one instance: take no more work, change its role, leave.

Served on the internal port, so it takes the cluster token. Translates messages; what happens is
``app``'s. Asked by ``kvrelay drain``, ``role`` and ``restart``.
"""

from typing import Any, Protocol

import grpc

from protos import cluster_pb2, cluster_pb2_grpc
from services.runtime.errors import ServiceError
from services.runtime.settings import Role


class Controlled(Protocol):
    """An instance."""

    async def take_no_more(self, *, now: bool) -> None: ...

    async def take_again(self) -> None: ...

    async def change_role(self, role: Role) -> None: ...

    def leave(self) -> None: ...


class InstanceService(cluster_pb2_grpc.InstanceServicer):
    """One instance, for its operator."""

    def __init__(self, instance: Controlled) -> None:
        self._instance = instance

    async def Drain(
        self, request: cluster_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> cluster_pb2.DrainResponse:
        if request.undo:
            await self._instance.take_again()
        else:
            await self._instance.take_no_more(now=request.now)
        return cluster_pb2.DrainResponse()

    async def SetRole(self, request: cluster_pb2.SetRoleRequest, context: Any) -> Any:
        try:
            await self._instance.change_role(Role.from_number(request.role))
        except ServiceError as error:
            await context.abort(error.codes.grpc, str(error))
        return cluster_pb2.SetRoleResponse()

    async def Leave(
        self, request: cluster_pb2.LeaveRequest, context: grpc.aio.ServicerContext
    ) -> cluster_pb2.LeaveResponse:
        self._instance.leave()
        return cluster_pb2.LeaveResponse()
