"""A colocated instance without an engine: ``python -m benchmarks.mock_instance ROUTER MODEL``.

It registers like any other and writes as many tokens as it is asked for, one of every request in
each message, as a decode step does; a token's text is the time it left, by the monotonic clock that
all processes of a host share. Started by ``benchmarks.router``; measures nothing.
"""

import argparse
import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from protos import cluster_pb2, kv_transfer_pb2, worker_pb2, worker_pb2_grpc
from protos import inference_pb2 as public
from services.runtime.server import GrpcServer, cluster_token
from services.worker.registration import Registration

MAX_CONTEXT = 4096
NUM_BLOCKS = 1 << 20
BLOCK_SIZE = 16


class MockDecode(worker_pb2_grpc.DecodeServicer):
    """Answers every request, a step at a time."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def Run(
        self, request_iterator: AsyncIterator[worker_pb2.DecodeCommand], context: Any
    ) -> AsyncIterator[worker_pb2.DecodeEvents]:
        left: dict[str, tuple[int, int]] = {}
        """Request -> tokens written, tokens asked for."""
        has_work = asyncio.Event()

        async def read() -> None:
            async for command in request_iterator:
                if command.HasField("start"):
                    request = command.start.request
                    left[request.request_id] = (0, request.sampling.max_tokens)
                    has_work.set()
                else:
                    left.pop(command.abort.request_id, None)

        reader = asyncio.create_task(read())
        try:
            while not context.done():
                await has_work.wait()
                yield worker_pb2.DecodeEvents(
                    events=[e for each in list(left) for e in step(left, each)]
                )
                if not left:
                    has_work.clear()
                # With no time for a step, commands are still read.
                await asyncio.sleep(self._step_s)
        finally:
            reader.cancel()


def step(left: dict[str, tuple[int, int]], request_id: str) -> list[worker_pb2.DecodeEvent]:
    """The next token of a request, and its end after the last; ``left`` follows."""
    written, asked = left[request_id]
    tokens = public.Tokens(token_ids=[97], text=f"{time.monotonic():.6f} ")
    if written + 1 < asked:
        left[request_id] = (written + 1, asked)
        return [worker_pb2.DecodeEvent(request_id=request_id, tokens=tokens)]
    del left[request_id]
    end = worker_pb2.DecodeFinished(
        finish_reason=public.FINISH_REASON_LENGTH, output_tokens=asked, last=tokens
    )
    return [worker_pb2.DecodeEvent(request_id=request_id, finished=end)]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("router")
    parser.add_argument("model")
    parser.add_argument("--step-s", type=float, default=0.0)
    options = parser.parse_args()
    token, instance_id = cluster_token(), f"mock-{secrets.token_hex(4)}"

    def mount(server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_DecodeServicer_to_server(MockDecode(options.step_s), server)

    server = GrpcServer(mount, "127.0.0.1", 0, token=token)
    await server.start()
    load = cluster_pb2.InstanceLoad(blocks_total=NUM_BLOCKS, blocks_free=NUM_BLOCKS)
    registration = Registration(
        options.router,
        token,
        instance_id,
        lambda: cluster_pb2.RegisterRequest(
            instance_id=instance_id,
            role=cluster_pb2.ROLE_COLOCATED,
            address=server.address,
            model=options.model,
            model_digest="mock",
            kv_layout=kv_transfer_pb2.KvLayout(
                dtype="float32",
                num_layers=1,
                num_kv_heads=1,
                head_dim=1,
                block_size=BLOCK_SIZE,
                order="rows",
            ),
            max_context=MAX_CONTEXT,
            max_sequence_tokens=NUM_BLOCKS * BLOCK_SIZE,
            load=load,
        ),
        lambda: load,
        lambda sequence: cluster_pb2.CacheNews(next_sequence=sequence),
    )
    await registration.start()
    await registration.watch()


if __name__ == "__main__":
    asyncio.run(main())
