"""What operators read over HTTP, from a running router."""

import httpx

from services.router.trace import Origin
from services.runtime.settings import Role
from tests.services.router.conftest import StartRouter
from tests.services.router.fake_worker import FakeWorker
from tests.services.router.harness import collect, generate_request

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_clients_context_comes_in_through_both_faces(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, decode=1)
    call = cluster.stub.Generate(
        generate_request("x" * 20, max_tokens=3), metadata=(("traceparent", PARENT),)
    )
    ids = [(await collect(call)).request_id]
    async with httpx.AsyncClient(base_url=cluster.url, timeout=10, trust_env=False) as client:
        for path, body in (
            ("/v1/completions", {"prompt": "x" * 20}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ):
            answer = await client.post(
                path, json={**body, "max_tokens": 3}, headers={"traceparent": PARENT}
            )
            ids.append(answer.json()["id"].partition("-")[2])
            found = await client.get(f"/debug/requests/{answer.json()['id']}")
            assert found.json()["otherData"]["request_id"] == ids[-1]
        assert (await client.get("/debug/requests/none")).status_code == 404
    traces = [cluster.router._serving._traces.find(each) for each in ids]
    assert [each and each.origin for each in traces] == [
        Origin("text_completion", PARENT),
        Origin("text_completion", PARENT),
        Origin("chat", PARENT),
    ]
    assert cluster.worker(Role.PREFILL).starts[0].wants_trace


async def test_without_traces_nothing_is_asked_for_or_kept(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, decode=1, trace_requests=0)
    got = await collect(cluster.stub.Generate(generate_request("x" * 20, max_tokens=3)))
    assert not cluster.worker(Role.PREFILL).starts[0].wants_trace
    assert cluster.router._serving._traces.find(got.request_id) is None


async def test_prometheus_finds_the_instances(start_router: StartRouter) -> None:
    cluster = await start_router()
    for port in (9102, 9101):
        await cluster.add(FakeWorker(Role.DECODE, metrics_address=f"127.0.0.1:{port}"))
    await cluster.add(FakeWorker(Role.DECODE))  # it serves none
    async with httpx.AsyncClient(base_url=cluster.url, timeout=10, trust_env=False) as client:
        found = (await client.get("/metrics/targets")).json()
    assert found == [{"targets": ["127.0.0.1:9101", "127.0.0.1:9102"], "labels": {}}]
