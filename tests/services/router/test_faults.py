"""Instances that die, hang, restart or do not belong, and nobody takes their place.

Requests end with a reason, at once. Where somebody does: ``test_healing``.
"""

import asyncio
import time
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as public
from protos import kv_transfer_pb2
from protos import worker_pb2 as wire
from services.runtime.errors import Unavailable
from services.runtime.settings import Role
from tests.services.router.conftest import StartRouter
from tests.services.router.fake_worker import ANSWER, FakeWorker, Script
from tests.services.router.harness import TestCluster, collect, eventually, generate_request


async def _failure(stream: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stream:
            pass
    return caught.value


async def _in_flight(cluster: TestCluster, prompt: str = "x" * 20) -> Any:
    """A request that has its first two tokens and waits for more."""
    call = cluster.stub.Generate(generate_request(prompt, max_tokens=9), timeout=10)
    stream, seen = aiter(call), 0
    while seen < 2:
        seen += (await anext(stream)).HasField("tokens")
    return stream


async def test_a_dead_decode_instance_ends_its_requests_at_once(start_router: StartRouter) -> None:
    cluster = await start_router(
        prefill=1, decode=1, script=Script(stall_after=2, silent_prefill=True)
    )
    prefill, decode = cluster.worker(Role.PREFILL), cluster.worker(Role.DECODE)
    calls = [await _in_flight(cluster) for _ in range(3)]
    killed_s = time.monotonic()
    await decode.kill()
    for call in calls:
        error = await _failure(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "decode instance at" in (error.details() or "")
    assert time.monotonic() - killed_s < 1
    await eventually(lambda: not prefill.running, within_s=0.5)
    await cluster.wait_state(decode, None)
    error = await _failure(cluster.stub.Generate(generate_request(), timeout=10))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "the last one has gone" in (error.details() or "")
    assert cluster.outcome("unavailable") == 4
    await cluster.add(FakeWorker(Role.DECODE))
    got = await collect(cluster.stub.Generate(generate_request(max_tokens=2), timeout=10))
    assert got.text == ANSWER[:2]


async def test_where_no_prefill_instance_is_left_decode_reads(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, decode=1, script=Script(first_s=30))
    prefill, decode = cluster.worker(Role.PREFILL), cluster.worker(Role.DECODE)
    call = cluster.stub.Generate(generate_request(max_tokens=9), timeout=10)
    await eventually(lambda: prefill.running and decode.running)
    decode.script = Script()
    await prefill.kill()
    got = await collect(call)
    assert got.text == ANSWER[:9]
    handed_over, alone = decode.starts
    assert handed_over.handoff_id and not alone.handoff_id
    assert decode.aborts == [handed_over.request.request_id]


async def test_a_prefill_instance_that_dies_after_its_part_harms_nobody(
    start_router: StartRouter,
) -> None:
    cluster = await start_router(prefill=1, script=Script(silent_prefill=True))
    await cluster.add(FakeWorker(Role.DECODE, Script(step_s=0.05)))
    call = await _in_flight(cluster)  # a second token means that all of the KV has landed
    await cluster.worker(Role.PREFILL).kill()
    events = [each async for each in call]
    assert events[-1].finished.finish_reason == public.FINISH_REASON_LENGTH
    line = events[-1].finished.timeline
    assert (line.handoff_s, line.grant_s) == (0, 0.125)  # what is known of it


async def test_a_prefill_failure_cancels_decode_and_names_the_reason(
    start_router: StartRouter,
) -> None:
    cluster = await start_router(decode=1, script=Script(first_s=30))
    refusing = Script(fail_after=0, failure=wire.WorkFailed(code=3, message="prompt: too long"))
    await cluster.add(FakeWorker(Role.PREFILL, refusing))
    decode = cluster.worker(Role.DECODE)
    started_s = time.monotonic()
    error = await _failure(cluster.stub.Generate(generate_request(), timeout=10))
    assert (error.code(), error.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt: too long",
    )
    assert time.monotonic() - started_s < 1
    await eventually(lambda: decode.aborts and not decode.running, within_s=0.5)
    assert cluster.outcome("invalid_argument") == 1


async def test_a_decode_failure_cancels_prefill(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, script=Script(first_s=30))
    await cluster.add(FakeWorker(Role.DECODE, Script(fail_after=0)))
    error = await _failure(cluster.stub.Generate(generate_request(), timeout=10))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    prefill = cluster.worker(Role.PREFILL)
    await eventually(lambda: prefill.aborts and not prefill.running, within_s=0.5)


@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED])
async def test_a_leg_that_gave_up_is_not_the_clients_own_end(
    start_router: StartRouter, code: grpc.StatusCode
) -> None:
    failure = wire.WorkFailed(code=code.value[0], message="gave it up")
    cluster = await start_router(decode=1, script=Script(fail_after=1, failure=failure))
    error = await _failure(cluster.stub.Generate(generate_request(), timeout=10))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "gave it up" in (error.details() or "")


async def test_an_answer_that_ends_at_its_first_token_stops_prefill(
    start_router: StartRouter,
) -> None:
    cluster = await start_router(prefill=1, script=Script(silent_prefill=True))
    await cluster.add(FakeWorker(Role.DECODE, Script(stop_at=0)))
    got = await collect(cluster.stub.Generate(generate_request(), timeout=10))
    assert got.finished is not None
    assert got.finished.finish_reason == public.FINISH_REASON_STOP
    assert (got.text, got.finished.usage.output_tokens) == ("", 0)
    prefill = cluster.worker(Role.PREFILL)
    await eventually(lambda: prefill.aborts and not prefill.running, within_s=0.5)


async def test_a_late_prefill_failure_does_not_spoil_a_whole_answer(
    start_router: StartRouter,
) -> None:
    cluster = await start_router(prefill=1, script=Script(fail_after=0))
    # One token: the prefill leg's failure is read while the answer is settled, if not before.
    await cluster.add(FakeWorker(Role.DECODE, Script(first_s=0.0)))
    calls = [cluster.stub.Generate(generate_request(max_tokens=2), timeout=10) for _ in range(20)]
    results = await asyncio.gather(*(collect(call) for call in calls), return_exceptions=True)
    for result in results:
        if isinstance(result, grpc.aio.AioRpcError):
            assert result.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        else:
            assert not isinstance(result, BaseException) and result.text == ANSWER[:2]


@pytest.mark.slow
async def test_an_instance_without_heartbeats_is_lost_with_its_requests(
    start_router: StartRouter,
) -> None:
    cluster = await start_router(decode=1, script=Script(stall_after=2))
    decode = cluster.worker(Role.DECODE)
    call = await _in_flight(cluster)
    await decode.stop_heart()
    silent_s = time.monotonic()
    error = await _failure(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "is silent" in (error.details() or "")
    assert 2.5 < time.monotonic() - silent_s < 4.5
    await cluster.wait_state(decode, None)
    assert not await decode.beat()  # told to register again
    await decode.register()
    await cluster.wait_state(decode, "ready")


async def test_a_restart_at_the_same_address_replaces_the_old_instance(
    start_router: StartRouter,
) -> None:
    cluster = await start_router(decode=1, script=Script(stall_after=2))
    old = cluster.worker(Role.DECODE)
    call = await _in_flight(cluster)
    former_id, old.instance_id = old.instance_id, "restarted"
    old.script = Script()
    await old.register()
    events = [each async for each in call]
    assert events[-1].finished.usage.output_tokens == 9
    assert events[-1].finished.timeline.attempts == 2
    await cluster.wait_state(old, "ready")
    assert former_id not in await cluster.states()


async def test_a_broken_stream_is_mended_by_registering_again(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1)
    decode = cluster.worker(Role.DECODE)
    await cluster.router._fleet.link(decode.instance_id).close(Unavailable("cut by the test"))
    cluster.router._fleet.deregister(decode.instance_id)
    await cluster.wait_state(decode, "ready")
    got = await collect(cluster.stub.Generate(generate_request(max_tokens=2), timeout=10))
    assert got.text == ANSWER[:2]


async def test_goodbye_ends_what_still_runs(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1, script=Script(stall_after=2))
    decode = cluster.worker(Role.DECODE)
    call = await _in_flight(cluster)
    await decode.stop_heart()
    await decode.leave()
    error = await _failure(call)
    assert "said goodbye" in (error.details() or "")
    await cluster.wait_state(decode, None)
    await decode.leave()  # twice is not an error


async def test_a_draining_instance_finishes_but_takes_no_more(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1, script=Script(step_s=0.05))
    decode = cluster.worker(Role.DECODE)
    call = await _in_flight(cluster)
    decode.load.draining = True
    await cluster.wait_state(decode, "draining")
    error = await _failure(cluster.stub.Generate(generate_request(), timeout=10))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    events = [each async for each in call]
    assert events[-1].HasField("finished")


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        ({"model": "other"}, "model: this cluster serves bytes"),
        ({"model_digest": "d2"}, "model_digest: d1 != d2"),
        (
            {"kv_layout": kv_transfer_pb2.KvLayout(dtype="bfloat16", num_layers=2, num_kv_heads=1,
                                                   head_dim=8, block_size=16, order="rows")},
            "kv_layout.dtype: float32 != bfloat16",
        ),
        (
            {"kv_layout": kv_transfer_pb2.KvLayout(dtype="float32", num_layers=2, num_kv_heads=1,
                                                   head_dim=8, block_size=32, order="rows")},
            "kv_layout.block_size: 16 != 32",
        ),
    ],
)  # fmt: skip
async def test_an_instance_that_differs_is_refused(
    start_router: StartRouter, described: dict[str, Any], reason: str
) -> None:
    cluster = await start_router(prefill=1)
    stranger = FakeWorker(Role.DECODE, **described)
    cluster.workers.append(stranger)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stranger.join(cluster.router.addresses.internal)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason in (caught.value.details() or "")
    assert list(await cluster.states()) == [cluster.worker(Role.PREFILL).instance_id]


@pytest.mark.parametrize(
    ("described", "field"),
    [
        ({"address": ""}, "address"),
        ({"model_digest": ""}, "model_digest"),
        ({"role": 0}, "role"),
        ({"max_context": 1}, "max_context"),
        ({"max_sequence_tokens": 0}, "max_sequence_tokens"),
        ({"kv_layout": kv_transfer_pb2.KvLayout(dtype="int3")}, "kv_layout.dtype"),
    ],
)
async def test_a_registration_that_makes_no_sense_is_refused(
    start_router: StartRouter, described: dict[str, Any], field: str
) -> None:
    cluster = await start_router()
    stranger = FakeWorker(Role.DECODE, **described)
    cluster.workers.append(stranger)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stranger.join(cluster.router.addresses.internal)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(f"{field}: ")


@pytest.mark.slow
async def test_an_instance_that_cannot_be_reached_is_dropped(start_router: StartRouter) -> None:
    cluster = await start_router()
    ghost = FakeWorker(Role.DECODE, address="127.0.0.1:1")
    cluster.workers.append(ghost)
    await ghost.join(cluster.router.addresses.internal, heartbeats=False)
    assert (await cluster.states())[ghost.instance_id] == "starting"
    error = await _failure(cluster.stub.Generate(generate_request(), timeout=10))
    assert "the cluster is starting" in (error.details() or "")
    await cluster.wait_state(ghost, None, within_s=5)


async def test_a_stopping_router_says_so_to_whoever_waits(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1, script=Script(stall_after=2))
    call = await _in_flight(cluster)
    await cluster.router.stop()
    error = await _failure(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "the router is stopping" in (error.details() or "")


async def test_a_draining_router_finishes_what_runs(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1, script=Script(step_s=0.05))
    call = await _in_flight(cluster)
    draining = asyncio.create_task(cluster.router.drain())
    await asyncio.sleep(0)
    error = await _failure(cluster.stub.Generate(generate_request(), timeout=10))
    assert "the router is stopping" in (error.details() or "")
    assert not draining.done()
    events = [each async for each in call]
    assert events[-1].HasField("finished")
    await asyncio.wait_for(draining, 2)


async def test_many_clients_that_vanish_leave_nothing(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, decode=1, script=Script(step_s=0.002))
    calls = [
        cluster.stub.Generate(generate_request(max_tokens=200), timeout=30) for _ in range(500)
    ]
    for index, call in enumerate(calls):
        if index % 5:
            call.cancel()
        else:
            await call.read()
            call.cancel()
        if index % 50 == 0:
            await asyncio.sleep(0)
    for worker in cluster.workers:
        await eventually(lambda worker=worker: not worker.running, within_s=5)
    await eventually(lambda: not len(cluster.router._serving._table))
    got = await collect(cluster.stub.Generate(generate_request(max_tokens=3), timeout=10))
    assert got.text == ANSWER[:3]
