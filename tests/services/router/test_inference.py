"""The public gRPC face over scripted instances: answers, aborts, deadlines, health, reflection."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as public
from protos import inference_pb2_grpc
from services.router.inference import RETRY_AFTER_KEY
from services.runtime.settings import Role
from tests.services.router.conftest import StartRouter
from tests.services.router.fake_worker import ANSWER, FakeWorker, Script
from tests.services.router.harness import TestCluster, collect, eventually, generate_request


async def test_a_prompt_is_answered_by_two_instances(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, decode=1)
    call = cluster.stub.Generate(
        generate_request(max_tokens=5, client_request_id="mine ✓", seed=7), timeout=10
    )
    got = await collect(call)
    assert got.text == ANSWER[:5]
    assert got.token_ids == [ord(letter) for letter in ANSWER[:5]]
    assert got.client_request_id == "mine ✓"
    assert got.accepted == public.Accepted(prompt_tokens=20, seed=7)
    assert got.finished is not None
    assert got.finished.finish_reason == public.FINISH_REASON_LENGTH
    assert got.finished.usage == public.Usage(prompt_tokens=20, output_tokens=5, cached_tokens=3)
    prefill, decode = cluster.worker(Role.PREFILL), cluster.worker(Role.DECODE)
    order, follow = prefill.starts[0], decode.starts[0]
    assert order.request == follow.request
    assert order.request.request_id == f"{got.request_id}/1", "each attempt has an id of its own"
    assert len(order.handoff_id) == 16 and order.handoff_id == follow.handoff_id
    assert order.target_address == decode.server.address
    assert order.target_instance_id == decode.instance_id
    assert follow.source_instance_id == prefill.instance_id
    line = got.finished.timeline
    assert line.prefill_instance == prefill.instance_id
    assert line.decode_instance == decode.instance_id
    assert line.queue_s == pytest.approx(0.25, abs=0.1)
    assert (line.prefill_s, line.handoff_s, line.handoff_hidden_ratio) == (0.5, 0.1, 0.75)
    assert (line.handoff_bytes, line.grant_s, line.first_decode_s) == (4096, 0.125, 0.01)
    assert 0 < line.ttft_s <= line.e2e_s
    assert line.tpot_s == pytest.approx((line.e2e_s - line.ttft_s) / 4)
    assert not prefill.aborts and not decode.aborts


@pytest.mark.parametrize(
    ("roles", "prompt", "max_tokens"),
    [
        ({"prefill": 1, "decode": 1}, "short", 3),
        ({"prefill": 1, "decode": 1}, "x" * 20, 1),
        ({"decode": 1}, "x" * 20, 3),
        ({"colocated": 1}, "x" * 20, 3),
        ({"prefill": 1, "colocated": 1}, "x" * 20, 3),
    ],
)
async def test_a_prompt_is_answered_by_one_instance(
    start_router: StartRouter, roles: dict[str, int], prompt: str, max_tokens: int
) -> None:
    cluster = await start_router(**roles)
    got = await collect(
        cluster.stub.Generate(generate_request(prompt, max_tokens=max_tokens), timeout=10)
    )
    assert got.text == ANSWER[:max_tokens]
    writer = next(each for each in cluster.workers if each.role is not Role.PREFILL)
    assert writer.starts[0].handoff_id == b""
    assert got.finished is not None
    line = got.finished.timeline
    assert (line.prefill_instance, line.decode_instance) == ("", writer.instance_id)
    assert line.queue_s == pytest.approx(0.25, abs=0.1)
    assert (line.prefill_s, line.handoff_s) == (0.5, 0.0)


async def test_token_ids_and_chats_reach_the_instance(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1)
    await collect(cluster.stub.Generate(generate_request([1, 2, 3], max_tokens=1), timeout=10))
    await collect(
        cluster.stub.Generate(generate_request([("user", "hi")], max_tokens=1), timeout=10)
    )
    starts = cluster.worker(Role.DECODE).starts
    assert list(starts[0].request.prompt_token_ids) == [1, 2, 3]
    assert bytes(starts[1].request.prompt_token_ids) == b"user: hi\nassistant:"


async def test_sampling_arrives_complete(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1)
    await collect(cluster.stub.Generate(generate_request("ab"), timeout=10))
    sampling = cluster.worker(Role.DECODE).starts[0].request.sampling
    assert sampling.max_tokens == 510  # what is left of the context of the instance
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.HasField("seed") and sampling.skip_special_tokens


@pytest.mark.parametrize("prompt", ["x" * 20, "short"])
async def test_a_client_that_leaves_stops_both_legs_at_once(
    start_router: StartRouter, prompt: str
) -> None:
    cluster = await start_router(
        prefill=1, decode=1, script=Script(stall_after=2, silent_prefill=True)
    )
    call = cluster.stub.Generate(generate_request(prompt, max_tokens=9), timeout=10)
    async for response in call:
        if response.HasField("tokens"):
            break
    call.cancel()
    for worker in cluster.workers:
        await eventually(lambda worker=worker: not worker.running, within_s=0.5)
        assert worker.aborts == [start.request.request_id for start in worker.starts]
    await eventually(lambda: cluster.outcome("abort") == 1)


async def test_abort_ends_a_request_by_its_id(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, decode=1, script=Script(stall_after=2))
    call = cluster.stub.Generate(generate_request(max_tokens=9), timeout=10)
    seen = []
    async for response in call:
        seen.append(response)
        if sum(each.HasField("tokens") for each in seen) == 2 and len(seen) == 3:
            request_id = response.request_id
            abort = public.AbortRequest(request_id=request_id)
            assert (await cluster.stub.Abort(abort)).found
    assert seen[-1].finished.finish_reason == public.FINISH_REASON_ABORT
    assert seen[-1].finished.usage == public.Usage(prompt_tokens=20, output_tokens=2)
    assert not (await cluster.stub.Abort(abort)).found
    await eventually(lambda: not cluster.worker(Role.DECODE).running)
    assert cluster.outcome("abort") == 1


async def test_a_deadline_ends_both_legs(start_router: StartRouter) -> None:
    cluster = await start_router(
        prefill=1, decode=1, script=Script(stall_after=1, silent_prefill=True)
    )
    started_s = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(cluster.stub.Generate(generate_request(max_tokens=9), timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    for worker in cluster.workers:
        await eventually(lambda worker=worker: worker.aborts and not worker.running, 0.5)
    assert time.monotonic() - started_s < 1
    await eventually(lambda: cluster.outcome("deadline_exceeded") == 1)


@pytest.fixture
async def narrow(start_router: StartRouter) -> AsyncIterator[tuple[TestCluster, grpc.aio.Channel]]:
    """A cluster, and a channel whose streams stand still after some dozen unread messages."""
    cluster = await start_router(decode=1)
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.lookahead_bytes", 1024),
        ("grpc.http2.bdp_probe", 0),
    ]
    async with grpc.aio.insecure_channel(cluster.router.addresses.grpc, options=options) as channel:
        yield cluster, channel


async def _read_to_end(call: Any) -> public.GenerateResponse:
    """The last message of a stream; raises AioRpcError if it does not end well."""
    last = public.GenerateResponse()
    while (message := await call.read()) is not grpc.aio.EOF:
        last = message
    return last


async def test_a_client_that_stops_reading_holds_nothing(
    narrow: tuple[TestCluster, grpc.aio.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.inference.READ_TIMEOUT_S", 0.3)
    cluster, channel = narrow
    stub = inference_pb2_grpc.InferenceStub(channel)
    call = stub.Generate(generate_request(max_tokens=450), timeout=10)
    await call.read()
    await eventually(lambda: cluster.outcome("abort") == 1)
    with pytest.raises(grpc.aio.AioRpcError, match="read nothing") as caught:
        await _read_to_end(call)
    assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_a_client_that_reads_slowly_gets_everything(
    narrow: tuple[TestCluster, grpc.aio.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.inference.READ_TIMEOUT_S", 0.5)
    cluster, channel = narrow
    stub = inference_pb2_grpc.InferenceStub(channel)
    call = stub.Generate(generate_request(max_tokens=450), timeout=10)
    for _ in range(5):
        for _ in range(60):  # enough to be seen at the other end
            await call.read()
        await asyncio.sleep(0.3)
    assert (await _read_to_end(call)).HasField("finished")
    assert cluster.outcome("length") == 1


async def test_too_many_at_once_are_refused_with_a_hint(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1, script=Script(stall_after=1), max_requests=2)
    running = [cluster.stub.Generate(generate_request(max_tokens=9)) for _ in range(2)]
    await eventually(lambda: len(cluster.worker(Role.DECODE).starts) == 2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(cluster.stub.Generate(generate_request(max_tokens=9)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata = dict(caught.value.trailing_metadata())
    assert int(metadata[RETRY_AFTER_KEY]) > 0
    for call in running:
        call.cancel()
    await eventually(lambda: cluster.outcome("abort") == 2)
    assert cluster.outcome("resource_exhausted") == 1


async def test_equal_and_odd_client_ids_do_not_mix_requests_up(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, decode=1, script=Script(step_s=0.001))
    ids = ["same", "same", "", "null", "a b\tc", "💥" * 50]
    calls = [
        cluster.stub.Generate(generate_request(max_tokens=8, client_request_id=each), timeout=10)
        for each in ids
    ]
    got = await asyncio.gather(*(collect(call) for call in calls))
    assert [each.client_request_id for each in got] == ids
    assert len({each.request_id for each in got}) == len(ids)
    assert all(each.text == ANSWER[:8] for each in got)


async def test_tokenize_and_get_model(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1)
    answer = await cluster.stub.Tokenize(public.TokenizeRequest(prompt="hé"))
    assert list(answer.token_ids) == [0x68, 0xC3, 0xA9]
    assert list(answer.tokens) == ["<0x68>", "<0xC3>", "<0xA9>"]
    chat = public.ChatMessages(messages=[public.ChatMessage(role="user", content="hi")])
    answer = await cluster.stub.Tokenize(public.TokenizeRequest(chat=chat))
    assert bytes(answer.token_ids) == b"user: hi\nassistant:"
    model = await cluster.stub.GetModel(public.GetModelRequest())
    assert (model.model, list(model.aliases), model.family) == ("bytes", ["demo"], "llama")
    assert (model.max_context, model.vocab_size, list(model.eos_token_ids)) == (512, 258, [257])
    assert model.model_digest == "d1"


async def test_two_instances_share_the_load(start_router: StartRouter) -> None:
    cluster = await start_router(decode=2, script=Script(stall_after=1))
    calls = [cluster.stub.Generate(generate_request("ab", max_tokens=9)) for _ in range(6)]
    await eventually(lambda: sum(len(each.starts) for each in cluster.workers) == 6)
    assert [len(each.starts) for each in cluster.workers] == [3, 3]
    for call in calls:
        call.cancel()


async def test_a_slow_second_instance_joins_and_is_used(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1)
    await cluster.add(FakeWorker(Role.DECODE))
    for _ in range(4):
        await collect(cluster.stub.Generate(generate_request("ab", max_tokens=1), timeout=10))
    assert [len(each.starts) for each in cluster.workers] == [2, 2]
