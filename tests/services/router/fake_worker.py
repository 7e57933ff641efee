"""An instance without an engine: a real gRPC server whose answers are scripted.

A decode instance answers with the letters of ``ANSWER``, one a step, as a byte tokenizer spells
them; of several answers each begins a letter later. A script can make either service fail, stall
or fall silent. Everything that the router asked for is kept, so that tests can look at it.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import cluster_pb2, cluster_pb2_grpc, kv_transfer_pb2, worker_pb2_grpc
from protos import inference_pb2 as public
from protos import worker_pb2 as wire
from services.runtime.server import GrpcServer, open_channel, token_metadata
from services.runtime.settings import Role

ANSWER = "abcdefghijklmnopqrstuvwxyz"
TOKEN = "test-token"
LAYOUT = kv_transfer_pb2.KvLayout(
    dtype="float32", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, order="rows"
)


@dataclass
class Script:
    """How an instance behaves."""

    step_s: float = 0.0
    """Between tokens."""
    first_s: float = 0.0
    """Before the first token, and before prefill is done."""
    stall_after: int | None = None
    """Decode: say nothing more after so many tokens."""
    fail_after: int | None = None
    """Decode: fail after so many tokens. Prefill: fail at once if it is 0."""
    failure: wire.WorkFailed = field(
        default_factory=lambda: wire.WorkFailed(code=8, message="no room here")
    )
    silent_prefill: bool = False
    """Prefill: never report the end."""
    stop_at: int | None = None
    """Decode: end with STOP after so many tokens."""
    answer: str = ANSWER
    """Decode: the letters, over and over."""


class FakeWorker:
    """One scripted instance; register it with ``join``."""

    def __init__(self, role: Role, script: Script | None = None, /, **described: Any) -> None:
        self.role = role
        self.script = script or Script()
        self.instance_id = secrets.token_hex(4)
        self.described = described
        self.starts: list[Any] = []
        self.aborts: list[str] = []
        self.running: dict[str, asyncio.Task[None]] = {}
        self.load = cluster_pb2.InstanceLoad(blocks_total=100, blocks_free=100)
        self.server = GrpcServer(self._mount, "127.0.0.1", 0, token=TOKEN, stop_grace_s=0)
        self._channel: grpc.aio.Channel | None = None
        self._heart: asyncio.Task[None] | None = None

    def _mount(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_PrefillServicer_to_server(_Prefill(self), server)
        worker_pb2_grpc.add_DecodeServicer_to_server(_Decode(self), server)

    async def join(self, router: str, heartbeats: bool = True) -> "FakeWorker":
        await self.server.start()
        self._channel = open_channel(router)
        await self.register()
        if heartbeats:
            self._heart = asyncio.create_task(self._beat())
        return self

    @property
    def cluster(self) -> cluster_pb2_grpc.ClusterStub:
        assert self._channel is not None
        return cluster_pb2_grpc.ClusterStub(self._channel)

    async def register(self) -> None:
        description = cluster_pb2.RegisterRequest(
            instance_id=self.instance_id,
            role=self.role.number,
            address=self.server.address,
            model="bytes",
            model_digest="d1",
            kv_layout=LAYOUT,
            max_context=512,
            max_sequence_tokens=4096,
            load=self.load,
        )
        change = cluster_pb2.RegisterRequest(**self.described)
        for name in self.described:
            if name == "kv_layout":
                description.kv_layout.CopyFrom(change.kv_layout)
            else:
                setattr(description, name, getattr(change, name))
        await self.cluster.Register(description, metadata=token_metadata(TOKEN), timeout=5)

    async def beat(self) -> bool:
        beat = cluster_pb2.HeartbeatRequest(instance_id=self.instance_id, load=self.load)
        answer = await self.cluster.Heartbeat(beat, metadata=token_metadata(TOKEN), timeout=5)
        return bool(answer.known)

    async def leave(self) -> None:
        request = cluster_pb2.DeregisterRequest(instance_id=self.instance_id)
        await self.cluster.Deregister(request, metadata=token_metadata(TOKEN), timeout=5)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            with contextlib.suppress(grpc.aio.AioRpcError):
                if not await self.beat():
                    await self.register()

    async def stop_heart(self) -> None:
        heart, self._heart = self._heart, None
        if heart is not None:
            heart.cancel()
            await asyncio.gather(heart, return_exceptions=True)

    async def kill(self) -> None:
        """Gone without a goodbye."""
        await self.stop_heart()
        await self.server.stop()

    async def stop(self) -> None:
        await self.kill()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def run(
        self,
        commands: AsyncIterator[Any],
        work: Callable[[Any, Callable[[Any], None]], Coroutine[Any, Any, None]],
    ) -> AsyncIterator[Any]:
        """One router's stream."""
        outbox: asyncio.Queue[Any] = asyncio.Queue()
        reader = asyncio.create_task(self._read(commands, work, outbox))
        try:
            while True:
                yield await outbox.get()
        finally:
            reader.cancel()
            for task in list(self.running.values()):
                task.cancel()

    async def _read(self, commands: Any, work: Any, outbox: asyncio.Queue[Any]) -> None:
        async for command in commands:
            if command.HasField("start"):
                self.starts.append(command.start)
                request_id = command.start.request.request_id
                task = asyncio.create_task(work(command.start, outbox.put_nowait))
                self.running[request_id] = task
                task.add_done_callback(lambda _, key=request_id: self.running.pop(key, None))
            else:
                self.aborts.append(command.abort.request_id)
                if task := self.running.get(command.abort.request_id):
                    task.cancel()


class _Prefill(worker_pb2_grpc.PrefillServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Run(self, request_iterator: Any, context: Any) -> AsyncIterator[wire.PrefillEvents]:
        async for events in self._worker.run(request_iterator, self._work):
            yield events

    async def _work(self, start: wire.StartPrefill, emit: Callable[[Any], None]) -> None:
        script, request_id = self._worker.script, start.request.request_id

        def say(**event: Any) -> None:
            told = wire.PrefillEvent(request_id=request_id, **event)
            emit(wire.PrefillEvents(events=[told]))

        if script.fail_after == 0:
            say(failed=script.failure)
            return
        say(started=wire.PrefillStarted(queue_s=0.25, grant_s=0.125))
        await asyncio.sleep(script.first_s)
        if script.silent_prefill:
            await asyncio.Event().wait()
        say(
            done=wire.PrefillDone(
                prefill_s=0.5,
                handoff_s=0.1,
                handoff_hidden_ratio=0.75,
                handoff_bytes=4096,
                computed_tokens=len(start.request.prompt_token_ids),
            )
        )


class _Decode(worker_pb2_grpc.DecodeServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Run(self, request_iterator: Any, context: Any) -> AsyncIterator[wire.DecodeEvents]:
        async for events in self._worker.run(request_iterator, self._work):
            yield events

    async def _work(self, start: wire.StartDecode, emit: Callable[[Any], None]) -> None:
        script, request = self._worker.script, start.request
        local = not start.handoff_id

        def say(**event: Any) -> None:
            told = wire.DecodeEvent(request_id=request.request_id, **event)
            emit(wire.DecodeEvents(events=[told]))

        await asyncio.sleep(script.first_s)
        wanted, num_answers = request.sampling.max_tokens, max(1, request.sampling.n)
        is_ranked = request.sampling.best_of > num_answers or request.sampling.HasField(
            "beam_search"
        )
        count = min(wanted, script.stop_at) if script.stop_at is not None else wanted
        for index in range(len(request.output_token_ids), count):
            if index == script.stall_after:
                await asyncio.Event().wait()
            if index == script.fail_after:
                say(failed=script.failure)
                return
            for choice in range(num_answers):
                letter = script.answer[(index + choice) % len(script.answer)]
                say(tokens=_tokens(letter, request, choice, is_first=index == 0))
            await asyncio.sleep(script.step_s)
        stopped = script.stop_at is not None and script.stop_at <= wanted
        reason = public.FINISH_REASON_STOP if stopped else public.FINISH_REASON_LENGTH
        for choice in range(num_answers if num_answers > 1 or is_ranked else 0):
            ended = public.ChoiceFinished(index=choice, finish_reason=reason, output_tokens=count)
            say(choice_finished=ended)
        say(
            finished=wire.DecodeFinished(
                finish_reason=reason,
                output_tokens=count * max(num_answers, request.sampling.best_of),
                cached_tokens=3,
                queue_s=0.25 if local else 0.0,
                prefill_s=0.5 if local else 0.0,
                first_decode_s=0.01,
            )
        )


def _tokens(letter: str, request: wire.WorkRequest, choice: int, is_first: bool) -> public.Tokens:
    """One token of an answer; the prompt's logprobs come with the first of the first."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    tokens = public.Tokens(token_ids=[ord(letter)], text=letter, index=choice)
    if sampling.HasField("logprobs"):
        tokens.logprobs.append(_record(ord(letter), sampling.logprobs))
    if sampling.HasField("prompt_logprobs") and is_first and choice == 0:
        tokens.prompt_logprobs.add().token.token_id = prompt[0]
        tokens.prompt_logprobs.extend(_record(i, sampling.prompt_logprobs) for i in prompt[1:])
    return tokens


def _record(token_id: int, num_top: int) -> public.TokenLogprobs:
    """The token is second to "0", before "1", "2" and so on."""
    token = public.TokenLogprob(token_id=token_id, logprob=-1.5, rank=2)
    others = [public.TokenLogprob(token_id=48 + i, logprob=-1.0 - i) for i in range(num_top)]
    for rank, each in enumerate(others, 1):
        each.rank = rank
    return public.TokenLogprobs(token=token, top=others)
