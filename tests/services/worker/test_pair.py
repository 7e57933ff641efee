"""A prefill and a decode instance in one process: what they say, and what they let go of."""

import asyncio
import random
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from engine.config import EngineConfig
from engine.request import fork_seed
from protos import inference_pb2 as public
from protos import worker_pb2 as wire
from protos import worker_pb2_grpc
from services.runtime.settings import Role, WorkerConfig
from services.worker.app import Worker
from tests.services.worker.pair import TOKEN, Pair, Registry, router_of

ENGINE = EngineConfig(dtype="float32", kv_cache_bytes=1 << 24)


KINDS = {"as computed": ENGINE, "int8 KV": replace(ENGINE, kv_dtype="int8")}
"""Of KV: each must arrive as it was sent."""


@pytest.fixture(params=["as computed"])
async def pair(
    request: pytest.FixtureRequest, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    monkeypatch.setenv("KVRELAY_CLUSTER_TOKEN", TOKEN)
    registry = Registry()
    router = router_of(registry)
    await router.start()
    workers = [
        Worker(WorkerConfig(str(tiny_model), role, router.address, engine=KINDS[request.param]))
        for role in (Role.PREFILL, Role.DECODE)
    ]
    for worker in workers:
        await worker.start()
    built = Pair(workers[0], workers[1], registry)
    yield built
    await built.nothing_held(2)
    await built.close()
    for worker in workers:
        await worker.stop()
    await router.stop()
    assert sorted(registry.gone) == sorted(w.instance_id for w in workers)


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(250), k=length)


@pytest.mark.parametrize("pair", KINDS, indirect=True)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 300])
async def test_handed_off_equals_local(pair: Pair, length: int) -> None:
    local, ended = await pair.answer(await pair.start(prompt(length), handoff=False))
    assert ended.finished.output_tokens == 8
    handed, ended = await pair.answer(await pair.start(prompt(length)))
    assert ended.finished.output_tokens == 8, ended
    assert handed == local
    started = await asyncio.wait_for(pair.prefill_leg.events.get(), 5)
    assert started.HasField("started")
    done = (await asyncio.wait_for(pair.prefill_leg.events.get(), 5)).done
    assert done.computed_tokens == length
    assert done.handoff_bytes > 0
    assert 0 <= done.handoff_hidden_ratio <= 1


async def test_a_second_time_prefixes_hit_on_both_sides(pair: Pair) -> None:
    first, _ = await pair.answer(await pair.start(prompt(300)))
    again, ended = await pair.answer(await pair.start(prompt(300)))
    assert again == first
    assert ended.finished.cached_tokens == 288
    events = [await asyncio.wait_for(pair.prefill_leg.events.get(), 5) for _ in range(4)]
    once, twice = (e.done for e in events if e.HasField("done"))
    assert twice.computed_tokens == 12 and twice.skipped_tokens == 288
    assert twice.handoff_bytes < once.handoff_bytes / 10


@pytest.mark.parametrize("length", [15, 16, 17, 300])
async def test_every_answer_is_that_of_its_own_seed(pair: Pair, length: int) -> None:
    """One handoff, three answers: each as if asked for alone, wherever the prompt is read."""
    drawn = {"temperature": 1.0, "max_tokens": 20}
    alone = []
    for index in range(3):
        seed = fork_seed(11, index)
        ids, end = await pair.answer(await pair.start(prompt(length), seed=seed, **drawn))
        alone.append([*ids, *end.finished.last.token_ids])
    for handoff in (True, False):
        request_id = await pair.start(prompt(length), handoff=handoff, seed=11, n=3, **drawn)
        assert await pair.answers(request_id, 3) == alone
        await pair.nothing_held()
    assert len({tuple(ids) for ids in alone}) == 3


async def test_answers_that_end_with_their_first_token(pair: Pair) -> None:
    """Every answer may end with any token of the others', the first one included."""
    drawn = {"temperature": 1.0, "seed": 3, "n": 4, "max_tokens": 6}
    free = await pair.answers(await pair.start(prompt(40), **drawn), 4)
    stops = [free[0][0], free[1][2]]
    assert free[2][0] not in stops, "the seed makes this test"
    cut = []
    for ids in free:
        at = next((i for i, token_id in enumerate(ids) if token_id in stops), len(ids))
        cut.append(ids[:at])
    for handoff in (True, False):
        request_id = await pair.start(prompt(40), handoff=handoff, stop_token_ids=stops, **drawn)
        assert await pair.answers(request_id, 4) == cut


async def test_an_abort_frees_every_answer(pair: Pair) -> None:
    for handoff in (True, False):
        request_id = await pair.start(prompt(40), 2000, handoff=handoff, n=4, temperature=1.0)
        for _ in range(20):
            await asyncio.wait_for(pair.decode_leg.events.get(), 5)
        await pair.decode_leg.say(abort=wire.StopWork(request_id=request_id))
        await pair.nothing_held()


@pytest.mark.slow
async def test_one_half_alone_fails_in_bounded_time(pair: Pair) -> None:
    request_id = await pair.start(prompt(40), legs="D")
    _, ended = await pair.answer(request_id)
    assert ended.HasField("failed") and "\n" not in ended.failed.message
    await pair.start(prompt(40), legs="P")
    event = await asyncio.wait_for(pair.prefill_leg.events.get(), 8)
    assert event.HasField("failed"), event


@pytest.mark.parametrize(
    ("ids", "stop"),
    [([], []), ([1, 2], [""]), ([1] * 3000, [])],
    ids=["empty", "stop", "too-long"],
)
async def test_an_order_that_makes_no_sense_still_ends(
    pair: Pair, ids: list[int], stop: list[str]
) -> None:
    sampling = public.SamplingParams(top_p=1, max_tokens=4, stop=stop)
    request = wire.WorkRequest(request_id="odd", prompt_token_ids=ids, sampling=sampling)
    await pair.decode_leg.say(start=wire.StartDecode(request=request))
    _, ended = await pair.answer("odd")
    assert ended.failed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], ended


async def test_abort_on_either_leg_frees_both(pair: Pair) -> None:
    for leg in (pair.prefill_leg, pair.decode_leg):
        request_id = await pair.start(prompt(300), max_tokens=1700)
        if leg is pair.decode_leg:
            await asyncio.sleep(0.03)
        await leg.say(abort=wire.StopWork(request_id=request_id))
        if leg is pair.prefill_leg:
            # Said right behind the start, so that the handoff cannot be over before.
            _, ended = await pair.answer(request_id)
            assert ended.HasField("failed"), ended
        await pair.nothing_held()


async def test_a_broken_stream_aborts_what_came_over_it(pair: Pair) -> None:
    await pair.start(prompt(300), max_tokens=1700)
    await asyncio.sleep(0.03)
    await pair.decode_leg.close()
    await pair.nothing_held()


async def test_a_router_that_forgot_is_told_again(pair: Pair) -> None:
    pair.registry.knows = False
    deadline = asyncio.get_running_loop().time() + 5
    while len(pair.registry.registered) < 3:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)
    assert len({r.model_digest for r in pair.registry.registered}) == 1
    assert {r.max_context for r in pair.registry.registered} == {2048}


async def test_calls_without_the_token_are_refused(pair: Pair) -> None:
    async with grpc.aio.insecure_channel(pair.decode.addresses.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in worker_pb2_grpc.DecodeStub(channel).Run(iter(())):
                pass
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_an_instance_is_ready_while_it_takes_requests(pair: Pair) -> None:
    def status_of(path: str) -> int:
        url = f"http://{pair.decode.addresses.metrics}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    async def probes() -> list[int]:
        return [await asyncio.to_thread(status_of, path) for path in ("/health", "/ready")]

    assert await probes() == [200, 200]
    await pair.decode.take_no_more()
    assert await probes() == [200, 503]
    await pair.decode.take_again()
    assert await probes() == [200, 200]
