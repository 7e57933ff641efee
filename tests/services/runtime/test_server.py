"""Ports, tokens and channels of gRPC servers."""

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import cluster_pb2, cluster_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.runtime import server as s
from services.runtime.errors import FailedPrecondition, InvalidArgument, Unavailable


class _Status(cluster_pb2_grpc.StatusServicer):
    async def GetStatus(self, request: Any, context: Any) -> cluster_pb2.GetStatusResponse:
        return cluster_pb2.GetStatusResponse(model="m")


class _Prefill(worker_pb2_grpc.PrefillServicer):
    async def Run(self, request_iterator: Any, context: Any) -> Any:
        yield worker_pb2.PrefillEvents()


def _mount(server: grpc.aio.Server) -> None:
    cluster_pb2_grpc.add_StatusServicer_to_server(_Status(), server)
    worker_pb2_grpc.add_PrefillServicer_to_server(_Prefill(), server)
    health_pb2_grpc.add_HealthServicer_to_server(grpc_health.aio.HealthServicer(), server)


async def test_any_free_port_becomes_a_real_one_and_stop_is_idempotent() -> None:
    server = s.GrpcServer(_mount, "localhost", 0)
    await server.start()
    assert server.port > 0
    assert server.address == f"127.0.0.1:{server.port}"
    channel = await s.connect(server.address)
    answer = await cluster_pb2_grpc.StatusStub(channel).GetStatus(cluster_pb2.GetStatusRequest())
    assert answer.model == "m"
    await channel.close()
    await server.stop()
    await server.stop()


async def test_a_taken_port_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    first = s.GrpcServer(_mount, "127.0.0.1", 0)
    await first.start()
    second = s.GrpcServer(_mount, "127.0.0.1", first.port)
    with pytest.raises(Unavailable, match=f"{first.port}: .*in use"):
        await second.start()
    assert capfd.readouterr().err == ""  # the error says it all
    await second.stop()
    await first.stop()


async def test_a_public_host_is_refused_unless_insecure() -> None:
    with pytest.raises(InvalidArgument, match="--insecure"):
        await s.GrpcServer(_mount, "0.0.0.0", 0).start()
    public = s.GrpcServer(_mount, "0.0.0.0", 0, insecure=True)
    await public.start()
    await public.stop()


@pytest.mark.parametrize("token", [None, "wrong", "secre", "secrets"])
async def test_internal_services_need_the_token(token: str | None) -> None:
    server = s.GrpcServer(_mount, "127.0.0.1", 0, token="secret")
    await server.start()
    channel = await s.connect(server.address)
    metadata = s.token_metadata(token) if token is not None else ()
    try:
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            stub = cluster_pb2_grpc.StatusStub(channel)
            await stub.GetStatus(cluster_pb2.GetStatusRequest(), metadata=metadata)
        assert unary.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert s.TOKEN_VARIABLE in (unary.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            await worker_pb2_grpc.PrefillStub(channel).Run(metadata=metadata).read()
        assert stream.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), metadata=metadata)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await channel.close()
        await server.stop()


async def test_the_right_token_opens_internal_services() -> None:
    server = s.GrpcServer(_mount, "127.0.0.1", 0, token="secret")
    await server.start()
    channel = await s.connect(server.address)
    metadata = s.token_metadata("secret")
    stub = cluster_pb2_grpc.StatusStub(channel)
    answer = await stub.GetStatus(cluster_pb2.GetStatusRequest(), metadata=metadata)
    assert answer.model == "m"
    run = worker_pb2_grpc.PrefillStub(channel).Run(metadata=metadata)
    assert isinstance(await run.read(), worker_pb2.PrefillEvents)
    await channel.close()
    await server.stop()


async def test_nobody_at_an_address_is_told_in_time() -> None:
    with pytest.raises(Unavailable, match=r"nobody answers at 127.0.0.1:1 \(waited 0.2 s\)"):
        await s.connect("127.0.0.1:1", timeout_s=0.2)


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(s.TOKEN_VARIABLE, "x")
    assert s.cluster_token() == "x"
    monkeypatch.delenv(s.TOKEN_VARIABLE)
    with pytest.raises(FailedPrecondition, match=s.TOKEN_VARIABLE):
        s.cluster_token()
