"""A cluster under mixed load while things happen to it: ``python -m benchmarks.soak --minutes 20``.

    clients  ask, compare whole answers with undisturbed ones, leave early now and then
    chaos    in turn at random: kill, stop (SIGSTOP), drain, drain now, change a role and back
    watch    the memory of every process, and at the end what is held and what metrics say

The cluster is 2P2D in float32. Things happen one at a time, when all instances are ready again; two
instances are never killed or stopped, so that their memory is seen for the whole run. Prints
tables, and fails when an answer failed or differs, something is held at the end, memory grows, or
metrics' totals are not the clients' own.
"""

import argparse
import asyncio
import os
import random
import secrets
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.chaos import Chaos, all_ready
from benchmarks.memory import Memory
from benchmarks.serve import WORDS
from benchmarks.started import Started, started
from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from protos import inference_pb2 as public

OPTIONS = ("--prefill", "2", "--decode", "2", "--dtype", "float32", "--weights", "float32")
CACHE = ("--kv-cache-bytes", "64MiB", "--disaggregate-from", "32", "--threads", "1")
"""A small cache is soon full; from then on it cannot grow."""
LEAVING_SHARE = 0.2
"""Of requests, whose client goes before the end: half by Abort, half by closing the call."""
LEAVES_WITHIN_S = 1.0
REFUSED_PAUSE_S = 0.5
HELD_S = 5.0
"""In which all must be free after the last answer."""
SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
GONE = "abort"
"""How the router's metrics call a request whose client left."""
REFUSED = "resource_exhausted"


def ways(dice: random.Random) -> list[public.GenerateRequest]:
    """What clients ask: short and long, greedy and drawn, several answers, stops, a schema."""
    sampled: list[tuple[int, dict[str, Any]]] = [
        (8, {"temperature": 0.0, "max_tokens": 24}),
        (60, {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True}),
        (250, {"temperature": 0.0, "max_tokens": 16, "logprobs": 2}),
        (40, {"temperature": 0.9, "seed": 3, "max_tokens": 48, "stop": ["\n", "the"]}),
        (100, {"temperature": 0.8, "seed": 7, "max_tokens": 24, "n": 2, "ignore_eos": True}),
        (20, {"temperature": 0.7, "seed": 5, "max_tokens": 1}),
    ]
    result = [_request(dice, words, sampling) for words, sampling in sampled]
    guided = _request(dice, 30, {"temperature": 0.0, "max_tokens": 32})
    guided.sampling.guided.json_schema = SCHEMA
    return [*result, guided]


def _request(dice: random.Random, words: int, sampling: dict[str, Any]) -> public.GenerateRequest:
    start = dice.randrange(len(WORDS) - words)
    prompt = " ".join(WORDS[start : start + words])
    return public.GenerateRequest(prompt=prompt, sampling=public.SamplingParams(**sampling))


@dataclass(slots=True)
class Answer:
    """What one stream said: the token ids by index, and how it ended."""

    tokens: dict[int, list[int]]
    outcome: str = ""
    output_tokens: int = 0
    said: str = ""


class Clients:
    """They ask until told that it is over, and count."""

    def __init__(self, stub: inference_pb2_grpc.InferenceStub, dice: random.Random) -> None:
        self._stub = stub
        self._dice = dice
        self._ways = ways(dice)
        self._expected: list[dict[int, list[int]]] = []
        self.over = asyncio.Event()
        self.outcomes: Counter[str] = Counter()
        self.output_tokens = 0
        self.num_left = 0
        """Asked to be left early; some had ended before."""
        self.wrong: list[str] = []

    async def learn(self) -> None:
        """Ask for everything once, undisturbed."""
        for way in self._ways:
            answer = await self._ask(way, None)
            self._count(answer)
            if answer.said:
                raise SystemExit(f"an undisturbed request failed: {answer.said}")
            self._expected.append(answer.tokens)

    async def user(self) -> None:
        while not self.over.is_set():
            number = self._dice.randrange(len(self._ways))
            leaves_s = None
            if self._dice.random() < LEAVING_SHARE:
                leaves_s = self._dice.uniform(0.0, LEAVES_WITHIN_S)
                self.num_left += 1
            answer = await self._ask(self._ways[number], leaves_s)
            self._count(answer)
            if answer.outcome == REFUSED:
                await asyncio.sleep(REFUSED_PAUSE_S)
            elif answer.said:
                self.wrong.append(f"a request failed: {answer.said}")
            elif answer.outcome != GONE and answer.tokens != self._expected[number]:
                self.wrong.append(f"an answer to request {number} differs from the undisturbed one")

    async def _ask(self, way: public.GenerateRequest, leaves_s: float | None) -> Answer:
        answer = Answer({})
        call = self._stub.Generate(way)
        leaving: asyncio.Task[None] | None = None
        try:
            async for response in call:
                if response.HasField("accepted") and leaves_s is not None:
                    # Only now: what is cancelled before may never have reached the router.
                    leaving = asyncio.create_task(self._leave(call, response.request_id, leaves_s))
                _note(answer, response)
        except asyncio.CancelledError:
            if leaving is None or not leaving.done():
                raise
            answer.outcome = GONE
        except grpc.aio.AioRpcError as error:
            answer.outcome = error.code().name.lower()
            answer.said = f"{error.code().name}: {error.details()}"
        finally:
            if leaving is not None:
                leaving.cancel()
        return answer

    async def _leave(self, call: Any, request_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if self._dice.random() < 0.5:
            call.cancel()
        else:
            await self._stub.Abort(public.AbortRequest(request_id=request_id))

    def _count(self, answer: Answer) -> None:
        self.outcomes[answer.outcome] += 1
        if answer.outcome != GONE:
            self.output_tokens += answer.output_tokens


def _note(answer: Answer, response: public.GenerateResponse) -> None:
    match response.WhichOneof("event"):
        case "tokens":
            got = answer.tokens.setdefault(response.tokens.index, [])
            got.extend(response.tokens.token_ids)
        case "finished":
            name = public.FinishReason.Name(response.finished.finish_reason)
            answer.outcome = name.removeprefix("FINISH_REASON_").lower()
            answer.output_tokens = response.finished.usage.output_tokens


def held(status: cluster_pb2.GetStatusResponse) -> list[str]:
    """A line for each instance where something is left, or whose accounts do not add up."""
    left = []
    for instance in status.instances:
        load = instance.load
        free = load.blocks_free + load.blocks_cached
        busy = load.requests_running + load.requests_waiting + load.handoffs_active
        if busy or free != load.blocks_total:
            left.append(f"{instance.instance_id}: {busy} held, {free} of {load.blocks_total} free")
    return left


def counted_differently(clients: Clients, totals: dict[str, int], output_tokens: int) -> list[str]:
    """A line for each total of the router's that is not the clients' own.

    A client that closes its call as the answer ends does not see that end: the router may have
    counted it by how it ended, and then all such must be missing among those that left.
    """
    wrong = []
    ours = clients.outcomes
    unseen = {name: totals.get(name, 0) - ours[name] for name in {*totals, *ours} - {GONE}}
    missing = ours[GONE] - totals.get(GONE, 0)
    if sum(totals.values()) != ours.total():
        wrong.append(f"the router counted {sum(totals.values())} requests, we {ours.total()}")
    if any(count < 0 for count in unseen.values()) or sum(unseen.values()) != missing:
        wrong.append(f"outcomes: the router counted {totals}, we {dict(ours)}")
    surplus = output_tokens - clients.output_tokens
    if surplus < 0 or (surplus and not missing):
        wrong.append(
            f"output tokens: the router counted {output_tokens}, we {clients.output_tokens}"
        )
    return wrong


def router_totals(http: str) -> tuple[dict[str, int], int]:
    """Requests by outcome, and output tokens, as the router's metrics say."""
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    outcomes, tokens = {}, 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "kvrelay_requests_total" and sample.value:
                outcomes[sample.labels["outcome"]] = int(sample.value)
            elif sample.name == "kvrelay_request_output_tokens_sum":
                tokens = int(sample.value)
    return outcomes, tokens


async def soak(running: Started, options: argparse.Namespace) -> list[str]:
    """The whole run; returns what went wrong."""
    dice = random.Random(options.seed)
    memory = Memory(running.pid)
    async with grpc.aio.insecure_channel(running.grpc) as channel:
        status = cluster_pb2_grpc.StatusStub(channel)
        clients = Clients(inference_pb2_grpc.InferenceStub(channel), dice)
        await clients.learn()
        chaos = Chaos(running, status, random.Random(options.seed))
        users = [asyncio.create_task(clients.user()) for _ in range(options.users)]
        watching = asyncio.create_task(memory.watch())
        until_s = time.monotonic() + options.minutes * 60
        while time.monotonic() < until_s:
            await asyncio.sleep(dice.expovariate(1 / options.pause_s))
            await chaos.strike()
        await all_ready(status)
        clients.over.set()
        await asyncio.gather(*users)
        watching.cancel()
        wrong = clients.wrong
        left = ["?"]
        give_up_s = time.monotonic() + HELD_S
        while left and time.monotonic() < give_up_s:
            await asyncio.sleep(0.2)
            left = held(await status.GetStatus(cluster_pb2.GetStatusRequest()))
    totals, output_tokens = await asyncio.to_thread(router_totals, running.http)
    print(f"what happened: {dict(chaos.struck)}")
    print(f"requests: {dict(clients.outcomes)}, {clients.num_left} of them to be left early;")
    print(f"the router counted {totals} and {output_tokens} output tokens, clients")
    print(f"{clients.output_tokens}\n")
    print(memory.table())
    return [*wrong, *left, *counted_differently(clients, totals, output_tokens), *memory.growing()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--pause-s", type=float, default=8.0, help="mean, between what happens")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Operating the instances needs the secret that they were started with.
    os.environ.setdefault("KVRELAY_CLUSTER_TOKEN", secrets.token_hex(16))
    with started("serve", options.model, *OPTIONS, *CACHE) as running:
        wrong = asyncio.run(soak(running, options))
    for line, count in Counter(wrong).items():
        print(f"{count}x {line}" if count > 1 else line, file=sys.stderr)
    if wrong:
        raise SystemExit(1)
    print("nothing failed, differs, is held, grows or was counted otherwise")


if __name__ == "__main__":
    main()
