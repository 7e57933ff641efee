"""What router tests share: a running router with its instances, and requests to it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from protos import inference_pb2 as public
from services.router.app import Router
from services.runtime.settings import Role
from tests.services.router.fake_worker import FakeWorker


async def eventually(check: Callable[[], Any], within_s: float = 2.0) -> Any:
    """The first true answer of ``check``."""
    deadline_s = time.monotonic() + within_s
    while not (answer := check()):
        assert time.monotonic() < deadline_s, f"not within {within_s} s"
        await asyncio.sleep(0.005)
    return answer


@dataclass
class TestCluster:
    """One router in this process."""

    __test__ = False

    router: Router
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceStub
    workers: list[FakeWorker] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.router.addresses.http}"

    async def add(self, worker: FakeWorker, **join: Any) -> FakeWorker:
        """Let an instance join, and wait until requests may be placed on it."""
        self.workers.append(worker)
        await worker.join(self.router.addresses.internal, **join)
        await self.wait_state(worker, "ready")
        return worker

    def worker(self, role: Role) -> FakeWorker:
        return next(each for each in self.workers if each.role is role)

    async def states(self) -> dict[str, str]:
        stub = cluster_pb2_grpc.StatusStub(self.channel)
        answer = await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=5)
        return {each.instance_id: each.state for each in answer.instances}

    async def wait_state(self, worker: FakeWorker, state: str | None, within_s: float = 2) -> None:
        """Until the status page shows the instance in ``state``; None: not at all."""
        deadline_s = time.monotonic() + within_s
        while (await self.states()).get(worker.instance_id) != state:
            assert time.monotonic() < deadline_s, f"{worker.role} is not {state}"
            await asyncio.sleep(0.01)

    def outcome(self, label: str) -> float:
        """How many requests ended so."""
        metrics = self.router._metrics
        return float(metrics.requests_total(label)._value.get())

    async def stop(self) -> None:
        await self.channel.close()
        for worker in self.workers:
            await worker.stop()
        await self.router.stop()


def generate_request(prompt: Any = "x" * 20, **fields: Any) -> public.GenerateRequest:
    """A request; sampling fields by name, ``client_request_id``, ``model`` and ``priority`` too."""
    outer = ("client_request_id", "model", "priority")
    request = public.GenerateRequest(
        sampling=public.SamplingParams(**{k: v for k, v in fields.items() if k not in outer}),
        **{k: v for k, v in fields.items() if k in outer},
    )
    if isinstance(prompt, str):
        request.prompt = prompt
    elif prompt and isinstance(prompt[0], tuple):
        for role, content in prompt:
            request.chat.messages.add(role=role, content=content)
    else:
        request.prompt_token_ids.ids.extend(prompt)
    return request


@dataclass
class Collected:
    """What one Generate stream said."""

    request_id: str = ""
    client_request_id: str = ""
    accepted: public.Accepted | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finished: public.Finished | None = None


async def collect(call: Any) -> Collected:
    """Reads a stream to its end; raises AioRpcError if it does not end well."""
    got = Collected()
    async for response in call:
        assert got.finished is None, "an event after the terminal one"
        assert got.request_id in ("", response.request_id)
        got.request_id = response.request_id
        match response.WhichOneof("event"):
            case "accepted":
                assert got.accepted is None
                got.accepted = response.accepted
                got.client_request_id = response.client_request_id
            case "tokens":
                assert got.accepted is not None
                got.text += response.tokens.text
                got.token_ids += response.tokens.token_ids
            case "finished":
                got.finished = response.finished
    return got
