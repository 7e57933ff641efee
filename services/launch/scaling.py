"""What the operator of a whole cluster may ask of whoever keeps it: more or fewer instances.

Served by ``kvrelay serve`` on a loopback port of its own, with the cluster token; routers tell
where in their status. Translates messages; what happens is ``supervise``'s. Asked by
``kvrelay scale``.
"""

from typing import Any

import grpc

from protos import cluster_pb2, cluster_pb2_grpc
from services.launch.place import LaunchError
from services.launch.supervise import Cluster
from services.runtime.errors import ServiceError
from services.runtime.settings import Role


class ScalingService(cluster_pb2_grpc.LauncherServicer):
    """One cluster, for its operator."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    def serve(self, cluster: Cluster) -> None:
        """From now on, answer for ``cluster``."""
        self._cluster = cluster

    def mount(self, server: grpc.aio.Server) -> None:
        cluster_pb2_grpc.add_LauncherServicer_to_server(self, server)

    async def Scale(self, request: cluster_pb2.ScaleRequest, context: Any) -> Any:
        counts = {role: getattr(request, role) for role in Role if request.HasField(role.value)}
        if self._cluster is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the cluster is still starting")
        else:
            try:
                await self._cluster.scale(counts)
            except ServiceError as error:
                await context.abort(error.codes.grpc, str(error))
            except LaunchError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return cluster_pb2.ScaleResponse()
