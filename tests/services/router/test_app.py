"""A router as others meet it: health, reflection, ports, tokens, no torch."""

import asyncio
import subprocess
import sys

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import cluster_pb2, cluster_pb2_grpc
from services.router.app import Router, run_router
from services.runtime.errors import InvalidArgument, NotFound, Unavailable, to_service_error
from services.runtime.server import TOKEN_VARIABLE, token_metadata
from services.runtime.settings import Role, RouterConfig
from tests.services.router.conftest import StartRouter, byte_model
from tests.services.router.fake_worker import ANSWER, TOKEN, FakeWorker
from tests.services.router.harness import TestCluster, eventually

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_the_router_loads_no_torch() -> None:
    check = (
        "import sys, services.router.app\n"
        "bad = {'torch', 'transformers', 'triton', 'ray'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=50)


async def _health(cluster: TestCluster, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(cluster.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status


@pytest.mark.parametrize("service", ["", "kvrelay.v1.Inference"])
async def test_health_follows_whether_a_request_could_be_placed(
    start_router: StartRouter, service: str
) -> None:
    cluster = await start_router(prefill=1)
    assert await _health(cluster, service) == NOT_SERVING
    watch = health_pb2_grpc.HealthStub(cluster.channel).Watch(
        health_pb2.HealthCheckRequest(service=service), timeout=20
    )
    assert (await watch.read()).status == NOT_SERVING
    decode = await cluster.add(FakeWorker(Role.DECODE))
    assert (await watch.read()).status == SERVING
    await decode.kill()
    assert (await watch.read()).status == NOT_SERVING
    await cluster.add(FakeWorker(Role.COLOCATED))
    assert (await watch.read()).status == SERVING
    await cluster.router.drain()
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()


async def test_a_client_that_knows_only_reflection(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, decode=1)
    ask = reflection_pb2_grpc.ServerReflectionStub(cluster.channel).ServerReflectionInfo()

    async def asked(**question: str) -> reflection_pb2.ServerReflectionResponse:
        await ask.write(reflection_pb2.ServerReflectionRequest(**question))
        return await ask.read()

    listed = (await asked(list_services="*")).list_services_response.service
    names = {each.name for each in listed}
    assert {"kvrelay.v1.Inference", "kvrelay.v1.Status", "grpc.health.v1.Health"} <= names
    assert not {"kvrelay.v1.Cluster", "kvrelay.v1.Prefill", "kvrelay.v1.Decode"} & names
    found = await asked(file_containing_symbol="kvrelay.v1.Inference")
    pool = descriptor_pool.DescriptorPool()
    for data in found.file_descriptor_response.file_descriptor_proto:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
    await ask.done_writing()
    method = pool.FindServiceByName("kvrelay.v1.Inference").methods_by_name["Generate"]
    ask_for = message_factory.GetMessageClass(method.input_type)
    answer_with = message_factory.GetMessageClass(method.output_type)
    call = cluster.channel.unary_stream(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=ask_for.SerializeToString,
        response_deserializer=answer_with.FromString,
    )
    request = ask_for(prompt="x" * 20)
    request.sampling.max_tokens = 3
    events = [event async for event in call(request, timeout=10)]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["accepted", "tokens", "tokens", "tokens", "finished"]
    assert "".join(event.tokens.text for event in events[1:4]) == ANSWER[:3]


async def test_status_is_public_and_registration_is_not(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, decode=1)
    answer = await cluster_pb2_grpc.StatusStub(cluster.channel).GetStatus(
        cluster_pb2.GetStatusRequest(), timeout=5
    )
    assert answer.model == "bytes"
    roles = {each.role for each in answer.instances}
    assert roles == {Role.PREFILL.number, Role.DECODE.number}
    assert all(each.load.blocks_total == 100 for each in answer.instances)
    request = cluster_pb2.DeregisterRequest(instance_id=cluster.workers[0].instance_id)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster_pb2_grpc.ClusterStub(cluster.channel).Deregister(request)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    async with grpc.aio.insecure_channel(cluster.router.addresses.internal) as internal:
        for stub, message in (
            (cluster_pb2_grpc.ClusterStub(internal).Deregister, request),
            (cluster_pb2_grpc.StatusStub(internal).GetStatus, cluster_pb2.GetStatusRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub(message)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            await stub(message, metadata=token_metadata(TOKEN))
    await cluster.wait_state(cluster.workers[0], "ready")  # it came back by its heartbeat


async def test_ports_are_free_again_after_a_stop_and_stop_is_idempotent() -> None:
    config = RouterConfig("bytes", grpc_port=0, http_port=0, internal_port=0)
    first = Router(config, byte_model(), TOKEN)
    await first.start()
    ports = [int(a.rpartition(":")[2]) for a in (first.addresses.grpc, first.addresses.http)]
    taken = RouterConfig("bytes", grpc_port=0, http_port=ports[1], internal_port=0)
    second = Router(taken, byte_model(), TOKEN)
    with pytest.raises(Unavailable, match=f"{ports[1]}: .*in use"):
        await second.start()
    await second.stop()
    await first.stop()
    await first.stop()
    again = Router(
        RouterConfig("bytes", grpc_port=ports[0], http_port=ports[1], internal_port=0),
        byte_model(),
        TOKEN,
    )
    await again.start()
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"http://{again.addresses.http}/health")).status_code == 200
    await again.stop()


async def test_run_router_needs_a_token_a_model_and_sane_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ready(addresses: object) -> None:
        raise AssertionError("must not become ready")

    with pytest.raises(InvalidArgument, match="--http-port"):
        await run_router(RouterConfig("demo", http_port=-1), ready)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(Exception, match=TOKEN_VARIABLE):
        await run_router(RouterConfig("demo"), ready)
    monkeypatch.setenv(TOKEN_VARIABLE, "t")
    with pytest.raises(Exception, match="no file or directory") as caught:
        await run_router(RouterConfig("/no/such/model"), ready)
    assert isinstance(to_service_error(caught.value), NotFound)


async def test_one_answer_over_http_takes_no_delayed_packets(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1)
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False) as client:
        await client.get("/health")
        started_s = loop.time()
        for _ in range(20):
            body = {"prompt": "a", "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        # Nagle's algorithm against delayed acknowledgements costs 40 ms an answer.
        assert (loop.time() - started_s) / 20 < 0.03
    await eventually(lambda: cluster.outcome("length") == 20)
