"""Every parameter says the same colocated, across a handoff, and preempted: in float32, exactly."""

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import pytest_asyncio

from engine.config import EngineConfig
from protos import inference_pb2 as public
from protos import worker_pb2 as wire
from protos import worker_pb2_grpc
from services.decode.service import DecodeService
from services.runtime.engine_port import EnginePort
from services.runtime.metrics import WorkerMetrics, new_registry
from services.runtime.server import open_channel
from services.runtime.settings import Role, WorkerConfig
from services.worker.app import Worker
from services.worker.build import ReadModel, build_engine, load_model, read_model
from tests.services.worker.pair import TOKEN, Leg, Registry, router_of
from tests.tiny_model import HEAD_DIM, KV_HEADS, LAYERS

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
BLOCK_BYTES = LAYERS * 2 * BLOCK * KV_HEADS * HEAD_DIM * 4
PROMPT = list(b"The quick brown fox jumps over.")
LAZY = b"The lazy dog sleeps on, and what it dreams of nobody will ever know. "
TWO_FILLERS = [list(LAZY[:66]), list(LAZY[1:67])]
ONE_FILLER = [list(LAZY * 2)[:114]]
"""Of older requests: so much KV that one more block is not to be had."""
ALL = -1
Said = dict[int, list[Any]]
"""Of each answer, by index; under ALL of all together."""
MOST = 32

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.9, "seed": 3},
    "seed": {"temperature": 0.9, "seed": 2**64 - 1},
    "top_k": {"temperature": 1.3, "top_k": 7, "seed": 4},
    "top_p": {"temperature": 1.1, "top_p": 0.6, "seed": 5},
    "min_p": {"temperature": 1.2, "min_p": 0.1, "seed": 6},
    "typical_p": {"temperature": 1.2, "typical_p": 0.7, "seed": 7},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -0.8},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": {97: 5.0, 98: -100.0}, "temperature": 1.0, "seed": 8},
    "bad_words": {"bad_word_token_ids": [public.TokenIds(ids=[t]) for t in range(32, 64)]},
    "logprobs": {"logprobs": 3, "temperature": 0.7, "seed": 9},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "n": {"n": 3, "temperature": 1.0, "seed": 10, "logprobs": 1, "prompt_logprobs": 1},
    "best_of": {"n": 2, "best_of": 3, "temperature": 1.0, "seed": 11},
    "beam_search": {"n": 2, "beam_search": public.BeamSearch(width=3, length_penalty=0.5)},
    "guided": {
        "ignore_eos": False,
        "guided": public.GuidedDecoding(regex="([a-z]{3} ){6}[0-9]{4}"),
        "temperature": 1.0,
        "seed": 12,
    },
    # Ended by what a greedy answer says late: see ``late``.
    "stop": {"stop": None},
    "include_stop": {"stop": None, "include_stop": True},
    "stop_token_ids": {"stop_token_ids": None},
    "min_tokens": {"stop_token_ids": None, "min_tokens": 30},
    "everything": {
        "temperature": 0.9,
        "seed": 13,
        "top_k": 60,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.95,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {101: 1.0},
        "bad_word_token_ids": [public.TokenIds(ids=[120, 121]), public.TokenIds(ids=[122])],
        "min_tokens": 20,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "n": 2,
    },
}
SEVERAL = ("n", "best_of", "beam_search", "everything")


class Pair:
    """A prefill and a decode instance."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self._target = decode
        self._channels = [open_channel(w.addresses.grpc) for w in (prefill, decode)]
        of_prefill, of_decode = self._channels
        self._prefill = Leg(worker_pb2_grpc.PrefillStub(of_prefill).Run, wire.PrefillCommand)
        self._decode = Leg(worker_pb2_grpc.DecodeStub(of_decode).Run, wire.DecodeCommand)

    async def ask(self, way: dict[str, Any], handoff: bool = False) -> Said:
        request, handoff_id = order("asked", PROMPT, way), secrets.token_bytes(16)
        await self._decode.say(
            start=wire.StartDecode(request=request, handoff_id=handoff_id if handoff else b"")
        )
        if handoff:
            await self._prefill.say(
                start=wire.StartPrefill(
                    request=request,
                    handoff_id=handoff_id,
                    target_address=self._target.addresses.grpc,
                    target_instance_id=self._target.instance_id,
                )
            )
        said: Said = defaultdict(list)
        while not said[ALL]:
            hear(await asyncio.wait_for(self._decode.events.get(), 20), said)
        for _ in range(2 if handoff else 0):
            event = await asyncio.wait_for(self._prefill.events.get(), 5)
        assert not handoff or event.done.handoff_bytes > 0
        return said

    async def close(self) -> None:
        for leg in (self._prefill, self._decode):
            await leg.close()
        for channel in self._channels:
            await channel.close()


async def preempted(model: ReadModel, way: dict[str, Any], fillers: list[list[int]]) -> Said:
    """What is said where older requests leave no block to grow into, so that ours gives way."""
    config = EngineConfig(dtype="float32", block_size=BLOCK, kv_cache_bytes=12 * BLOCK_BYTES)
    loaded = load_model(model, config)
    port = EnginePort(asyncio.get_running_loop(), lambda record: None)
    engine = build_engine(loaded, config, port)
    metrics = WorkerMetrics.create(new_registry(), "tiny", Role.COLOCATED, "a")
    service = DecodeService(engine, port, None, loaded.tokenizer, metrics)
    # They fill their last blocks to the brim and never grow.
    fields = {"max_tokens": 14}
    requests = [order(f"filler-{i}", ids, fields) for i, ids in enumerate(fillers)]
    requests.append(order("asked", PROMPT, way))
    all_said = asyncio.Event()

    async def commands() -> AsyncIterator[wire.DecodeCommand]:
        for request in requests:
            yield wire.DecodeCommand(start=wire.StartDecode(request=request))
        while engine.load().requests_waiting < len(requests):
            await asyncio.sleep(0.001)
        engine.start()
        await all_said.wait()

    said: Said = defaultdict(list)
    async with asyncio.timeout(20):
        async for batch in service.Run(commands(), Mock()):
            for event in batch.events:
                if event.request_id == "asked":
                    hear(event, said)
            if said[ALL]:
                all_said.set()
    await service.settle()
    await asyncio.to_thread(engine.stop)
    engine.check_integrity()
    load = engine.load()
    assert load.num_preemptions > 0 and load.blocks.held == 0
    return said


def order(request_id: str, ids: list[int], fields: dict[str, Any]) -> wire.WorkRequest:
    every = {"temperature": 0, "top_p": 1, "max_tokens": MOST, "ignore_eos": True}
    sampling = public.SamplingParams(**(every | fields))
    return wire.WorkRequest(request_id=request_id, prompt_token_ids=ids, sampling=sampling)


def hear(event: wire.DecodeEvent, said: Said) -> None:
    """Keep what must not depend on where it was computed: all but times, cache hits and turns."""
    kind = event.WhichOneof("event")
    assert kind != "failed", event
    if kind != "finished":
        what = getattr(event, kind)
        said[what.index].append(what)
        return
    end = event.finished
    alone = (end.finish_reason, end.stop_reason) if end.HasField("last") else ()
    said[ALL].append((alone, end.output_tokens, end.last))


def tokens_of(said: Said) -> list[public.Tokens]:
    return [each for every in said.values() for each in every if isinstance(each, public.Tokens)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tiny_model: Path) -> AsyncIterator[Pair]:
    patch = pytest.MonkeyPatch()
    patch.setenv("KVRELAY_CLUSTER_TOKEN", TOKEN)
    router = router_of(Registry())
    await router.start()
    engine = EngineConfig(dtype="float32", block_size=BLOCK, kv_cache_bytes=1 << 24)
    prefill, decode = workers = [
        Worker(WorkerConfig(str(tiny_model), role, router.address, engine=engine))
        for role in (Role.PREFILL, Role.DECODE)
    ]
    for worker in workers:
        await worker.start()
    built = Pair(prefill, decode)
    yield built
    await built.close()
    for worker in workers:
        await worker.stop()
    await router.stop()
    patch.undo()


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ReadModel:
    return read_model(str(tiny_model), EngineConfig(dtype="float32"))


async def way_of(pair: Pair, name: str) -> dict[str, Any]:
    """With stops that a greedy answer meets late, so that there is time for a preemption."""
    way = dict(WAYS[name])
    if None not in way.values():
        return way
    tokens = tokens_of(await pair.ask({}))
    for at, each in enumerate(tokens[18:], 18):
        token_id, text = each.token_ids[0], each.text
        is_new = not any(token_id in t.token_ids or text in t.text for t in tokens[:at])
        if is_new and text and "\ufffd" not in text:
            break
    else:
        raise AssertionError("the model says nothing new late")
    if "stop" in way:
        way["stop"] = [text]
    if "stop_token_ids" in way:
        way["stop_token_ids"] = [token_id]
    return way


@pytest.mark.parametrize("name", WAYS)
async def test_it_says_the_same_wherever_it_is_computed(
    pair: Pair, model: ReadModel, name: str
) -> None:
    way = await way_of(pair, name)
    handed = await pair.ask(way, handoff=True)
    assert await pair.ask(way) == handed
    assert await preempted(model, way, ONE_FILLER if name in SEVERAL else TWO_FILLERS) == handed


async def test_they_do_something(pair: Pair) -> None:
    """Else equal answers would show little."""
    answers = {}
    for name in WAYS:
        said = await pair.ask(await way_of(pair, name))
        answers[name] = str([said[index] for index in sorted(said)])
    alike = [name for name, each in answers.items() if list(answers.values()).count(each) > 1]
    assert not alike
