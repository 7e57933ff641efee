"""A router on real ports over a byte tokenizer, and scripted instances that join it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from engine.tokenizer import ByteTokenizer
from protos import inference_pb2_grpc
from services.router.app import Router
from services.router.served_model import ServedModel
from services.runtime.settings import Role, RouterConfig
from tests.services.router.fake_worker import TOKEN, FakeWorker, Script
from tests.services.router.harness import TestCluster

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
StartRouter = Callable[..., Awaitable[TestCluster]]


def byte_model(chat_template: str | None = CHAT_TEMPLATE) -> ServedModel:
    tokenizer = ByteTokenizer(add_bos=False, chat_template=chat_template)
    return ServedModel("bytes", ("demo",), "llama", 1024, tokenizer.vocab_size, tokenizer)


@pytest.fixture
async def start_router() -> AsyncIterator[StartRouter]:
    """Makes clusters: ``await start_router(prefill=1, decode=1)``."""
    started: list[TestCluster] = []

    async def start(
        prefill: int = 0,
        decode: int = 0,
        colocated: int = 0,
        script: Script | None = None,
        model: ServedModel | None = None,
        **config: Any,
    ) -> TestCluster:
        settings = {"grpc_port": 0, "http_port": 0, "internal_port": 0, "disaggregate_from": 8}
        router = Router(
            RouterConfig("bytes", **{**settings, **config}), model or byte_model(), TOKEN
        )
        await router.start()
        channel = grpc.aio.insecure_channel(router.addresses.grpc)
        cluster = TestCluster(router, channel, inference_pb2_grpc.InferenceStub(channel))
        started.append(cluster)
        roles = {Role.PREFILL: prefill, Role.DECODE: decode, Role.COLOCATED: colocated}
        for role, count in roles.items():
            for _ in range(count):
                await cluster.add(FakeWorker(role, script))
        return cluster

    yield start
    for cluster in started:
        await cluster.stop()
