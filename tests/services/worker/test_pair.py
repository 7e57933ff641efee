"""A prefill and a decode instance in one process, driven as a router would: no router involved."""

import asyncio
import random
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.config import EngineConfig
from engine.request import fork_seed
from protos import cluster_pb2, cluster_pb2_grpc, worker_pb2_grpc
from protos import inference_pb2 as public
from protos import worker_pb2 as wire
from services.runtime.server import GrpcServer, open_channel, token_metadata
from services.runtime.settings import Role, WorkerConfig
from services.worker.app import Worker
from tests.tiny_model import make_tiny_model

TOKEN = "a token"
ENGINE = EngineConfig(dtype="float32", kv_cache_bytes=1 << 24)


class Registry(cluster_pb2_grpc.ClusterServicer):
    """The router's side of membership, that says yes to everything."""

    def __init__(self) -> None:
        self.registered: list[cluster_pb2.RegisterRequest] = []
        self.beats: list[cluster_pb2.HeartbeatRequest] = []
        self.gone: list[str] = []
        self.knows = True

    async def Register(self, request: Any, context: Any) -> Any:
        self.registered.append(request)
        self.knows = True
        return cluster_pb2.RegisterResponse(heartbeat_interval_s=0.05)

    async def Heartbeat(self, request: Any, context: Any) -> Any:
        self.beats.append(request)
        return cluster_pb2.HeartbeatResponse(known=self.knows)

    async def Deregister(self, request: Any, context: Any) -> Any:
        self.gone.append(request.instance_id)
        return cluster_pb2.DeregisterResponse()


class Leg:
    """One Run stream to one instance."""

    def __init__(self, method: Any, container: Any) -> None:
        self._call = method(metadata=token_metadata(TOKEN))
        self._container = container
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def say(self, **command: Any) -> None:
        await self._call.write(self._container(**command))

    async def _read(self) -> None:
        try:
            async for message in self._call:
                for event in message.events:
                    self.events.put_nowait(event)
        except grpc.aio.AioRpcError:
            return

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


class Pair:
    """Both instances, a leg to each, and what a router does with them."""

    def __init__(self, prefill: Worker, decode: Worker, registry: Registry) -> None:
        self.prefill, self.decode, self.registry = prefill, decode, registry
        self._channels = [open_channel(w.addresses.grpc) for w in (prefill, decode)]
        self.prefill_leg = Leg(
            worker_pb2_grpc.PrefillStub(self._channels[0]).Run, wire.PrefillCommand
        )
        self.decode_leg = Leg(worker_pb2_grpc.DecodeStub(self._channels[1]).Run, wire.DecodeCommand)

    async def start(
        self,
        ids: list[int],
        max_tokens: int = 8,
        handoff: bool = True,
        legs: str = "PD",
        **sampling_fields: Any,
    ) -> str:
        request_id, handoff_id = secrets.token_hex(4), secrets.token_bytes(16)
        fields = {"temperature": 0, "top_p": 1, "max_tokens": max_tokens, "ignore_eos": True}
        sampling = public.SamplingParams(**(fields | sampling_fields))
        request = wire.WorkRequest(request_id=request_id, prompt_token_ids=ids, sampling=sampling)
        if "D" in legs:
            await self.decode_leg.say(
                start=wire.StartDecode(request=request, handoff_id=handoff_id if handoff else b"")
            )
        if handoff and "P" in legs:
            await self.prefill_leg.say(
                start=wire.StartPrefill(
                    request=request,
                    handoff_id=handoff_id,
                    target_address=self.decode.addresses.grpc,
                    target_instance_id=self.decode.instance_id,
                )
            )
        return request_id

    async def answer(self, request_id: str) -> tuple[list[int], wire.DecodeEvent]:
        ids: list[int] = []
        while True:
            event = await asyncio.wait_for(self.decode_leg.events.get(), 20)
            assert event.request_id == request_id
            if not event.HasField("tokens"):
                return ids, event
            ids += event.tokens.token_ids

    async def answers(self, request_id: str, count: int) -> list[list[int]]:
        """The token ids of several answers to one request, each ended once, and all together."""
        ids: list[list[int]] = [[] for _ in range(count)]
        ended: list[int] = []
        while True:
            event = await asyncio.wait_for(self.decode_leg.events.get(), 20)
            match event.WhichOneof("event"):
                case "tokens":
                    ids[event.tokens.index] += event.tokens.token_ids
                case "choice_finished":
                    choice = event.choice_finished
                    assert choice.output_tokens == len(ids[choice.index])
                    ended.append(choice.index)
                case "finished":
                    assert sorted(ended) == list(range(count))
                    assert event.finished.output_tokens == sum(map(len, ids))
                    return ids
                case _:
                    raise AssertionError(event)

    async def nothing_held(self, within_s: float = 1.0) -> None:
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            loads = [w.load() for w in (self.prefill, self.decode)]
            if not any(
                m.blocks_held or m.requests_running or m.requests_waiting or m.handoffs_active
                for m in loads
            ):
                return
            assert asyncio.get_running_loop().time() < deadline, loads
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.prefill_leg.close()
        await self.decode_leg.close()
        for channel in self._channels:
            await channel.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def pair(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setenv("KVRELAY_CLUSTER_TOKEN", TOKEN)
    registry = Registry()
    router = GrpcServer(
        lambda server: cluster_pb2_grpc.add_ClusterServicer_to_server(registry, server),
        "127.0.0.1",
        0,
        token=TOKEN,
    )
    await router.start()
    workers = [
        Worker(WorkerConfig(str(tiny_model), role, router.address, engine=ENGINE))
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
