"""A request whose instance fails goes on elsewhere, and its client sees no seam."""

import asyncio
import time
from typing import Any

import grpc
import pytest

from protos import worker_pb2 as wire
from services.router.healing import (
    HEAL_S,
    MAX_ATTEMPTS,
    PROGRESS_TOKENS,
    History,
    LegFailure,
    verdict,
)
from services.runtime.errors import (
    Internal,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from services.runtime.settings import Role
from tests.services.router.conftest import StartRouter
from tests.services.router.fake_worker import ANSWER, FakeWorker, Script
from tests.services.router.harness import TestCluster, collect, eventually, generate_request

ALIVE = LegFailure(Unavailable("no"), died=False, living=frozenset({"d"}))
DEAD = LegFailure(Unavailable("gone"), died=True, living=frozenset())


def told(*failures: LegFailure, num_new_tokens: int = 0, apart_s: float = 0.0) -> Any:
    """What the client hears after these, one after the other."""
    history = History()
    for number, failure in enumerate(failures):
        now_s = number * apart_s
        history = history.after(failure, num_new_tokens, now_s)
        if (error := verdict(history, failure, now_s)) is not None:
            return error
    return None


@pytest.mark.parametrize(
    "error", [InvalidArgument("prompt", "is bad"), ResourceExhausted("full")], ids=type
)
def test_what_is_wrong_with_the_request_is_told_at_once(error: ServiceError) -> None:
    assert told(LegFailure(error, died=False, living=frozenset())) is error


def test_one_death_is_healed_and_two_are_suspicious() -> None:
    assert told(DEAD) is None
    error = told(DEAD, DEAD)
    assert isinstance(error, Internal) and "2 instances died" in str(error)


def test_deaths_of_a_request_that_gets_on_are_not_its_fault() -> None:
    assert told(*[DEAD] * 20, num_new_tokens=PROGRESS_TOKENS) is None


def test_attempts_are_bounded() -> None:
    assert told(*[ALIVE] * (MAX_ATTEMPTS - 1)) is None
    assert isinstance(told(*[ALIVE] * MAX_ATTEMPTS), Unavailable)


def test_time_is_bounded() -> None:
    assert told(ALIVE, ALIVE, apart_s=HEAL_S - 1) is None
    assert isinstance(told(ALIVE, ALIVE, apart_s=HEAL_S), Unavailable)


def test_who_failed_is_avoided_until_the_request_gets_on() -> None:
    history = History().after(ALIVE, 0, 0.0)
    assert history.avoid == {"d"}
    assert history.after(DEAD, PROGRESS_TOKENS, 0.0).avoid == frozenset()


async def _begun(cluster: TestCluster, num_tokens: int, **fields: Any) -> Any:
    """A request that has so many tokens, and its stream."""
    call = cluster.stub.Generate(generate_request("x" * 20, **fields), timeout=10)
    stream, seen, text = aiter(call), 0, ""
    while seen < num_tokens:
        response = await anext(stream)
        seen += len(response.tokens.token_ids)
        text += response.tokens.text
    return stream, text


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_dead_decode_instance_is_replaced(
    start_router: StartRouter, num_prefill: int
) -> None:
    cluster = await start_router(prefill=num_prefill, decode=1, script=Script(stall_after=3))
    stalled = cluster.worker(Role.DECODE)
    stream, text = await _begun(cluster, 3, max_tokens=9, seed=7)
    other = await cluster.add(FakeWorker(Role.DECODE))
    await stalled.kill()
    responses = [each async for each in stream]
    assert text + "".join(each.tokens.text for each in responses) == ANSWER[:9]
    finished = responses[-1].finished
    assert (finished.usage.output_tokens, finished.timeline.attempts) == (9, 2)
    [order], [first] = other.starts, stalled.starts
    assert bytes(order.request.output_token_ids).decode() == ANSWER[:3]
    assert order.request.prompt_token_ids == first.request.prompt_token_ids
    assert order.request.sampling == first.request.sampling
    assert order.request.request_id != first.request.request_id
    if num_prefill:
        assert order.handoff_id and order.handoff_id != first.handoff_id
    assert cluster.outcome("length") == 1


async def test_several_answers_are_written_anew_and_told_once(start_router: StartRouter) -> None:
    cluster = await start_router(prefill=1, decode=1, script=Script(stall_after=3))
    stalled = cluster.worker(Role.DECODE)
    call = cluster.stub.Generate(generate_request("x" * 20, max_tokens=9, n=2, seed=7), timeout=10)
    stream = aiter(call)
    responses = [await anext(stream) for _ in range(5)]
    other = await cluster.add(FakeWorker(Role.DECODE))
    await stalled.kill()
    responses += [each async for each in stream]
    texts = ["", ""]
    for each in responses:
        texts[each.tokens.index] += each.tokens.text
    assert texts == [ANSWER[:9], ANSWER[1:10]]
    ends = [each.choice_finished for each in responses if each.HasField("choice_finished")]
    assert [(each.index, each.output_tokens) for each in ends] == [(0, 9), (1, 9)]
    usage = responses[-1].finished.usage
    assert (usage.prompt_tokens, usage.output_tokens) == (20, 18)
    [order] = other.starts
    assert not order.request.output_token_ids and order.request.sampling.seed == 7


async def test_a_leg_that_fails_is_tried_elsewhere_first(start_router: StartRouter) -> None:
    failing = Script(step_s=0.3, fail_after=2, failure=wire.WorkFailed(code=13, message="a bug"))
    cluster = await start_router(decode=1, script=failing)
    stream, _ = await _begun(cluster, 1, max_tokens=9)
    await cluster.add(FakeWorker(Role.DECODE))
    responses = [each async for each in stream]
    assert responses[-1].finished.usage.output_tokens == 9


async def test_a_replacement_that_comes_in_time_is_taken(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1, script=Script(stall_after=3))
    stream, text = await _begun(cluster, 3, max_tokens=6)
    await cluster.worker(Role.DECODE).kill()
    await asyncio.sleep(0.2)
    await cluster.add(FakeWorker(Role.DECODE))
    text += "".join([each.tokens.text async for each in stream])
    assert text == ANSWER[:6]


async def test_a_request_that_kills_is_stopped(start_router: StartRouter) -> None:
    cluster = await start_router(decode=2, script=Script(stall_after=0))
    call = cluster.stub.Generate(generate_request(max_tokens=9), timeout=10)
    reading = asyncio.create_task(collect(call))
    for victim_number in (1, 2):
        await eventually(lambda n=victim_number: sum(len(w.starts) for w in cluster.workers) == n)
        [victim] = [w for w in cluster.workers if w.running]
        await victim.kill()
        victim.running.clear()
    with pytest.raises(grpc.aio.AioRpcError, match="2 instances died") as caught:
        await reading
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_a_client_that_goes_while_nobody_is_there_waits_for_nobody(
    start_router: StartRouter,
) -> None:
    cluster = await start_router(decode=1, script=Script(stall_after=1))
    stream, _ = await _begun(cluster, 1, max_tokens=9)
    del stream
    request_id = next(iter(cluster.router._serving._table._records))
    call = cluster.stub.Generate(generate_request(max_tokens=9), timeout=10)
    events = aiter(call)
    mine = (await anext(events)).request_id
    assert mine != request_id
    await cluster.worker(Role.DECODE).kill()
    await asyncio.sleep(0.1)
    began_s = time.monotonic()
    assert cluster.router._serving.abort(mine)
    last = [each async for each in events][-1]
    assert last.HasField("finished")
    assert time.monotonic() - began_s < 0.5


async def test_a_deadline_ends_the_wait_for_an_instance(start_router: StartRouter) -> None:
    cluster = await start_router(decode=1, script=Script(stall_after=1))
    call = cluster.stub.Generate(generate_request(max_tokens=9), timeout=0.6)
    await eventually(lambda: cluster.worker(Role.DECODE).running)
    await cluster.worker(Role.DECODE).kill()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: cluster.outcome("deadline_exceeded") == 1)
