"""``kvrelay generate``: one prompt to a running router, the answer as it comes.

The answer goes to stdout, everything about it to stderr; with ``--json`` stdout gets one object
at the end instead. Called by ``main`` and, for its stream, by ``demo``.
"""

import asyncio
import json
import sys
from dataclasses import dataclass

import grpc
from rich.console import Console

from protos import inference_pb2
from services.cli.client import Answer, connected, generate
from services.cli.timeline import draw


@dataclass(frozen=True, slots=True)
class Ask:
    """What to ask for."""

    prompt: str
    chat: bool = False
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def request(self) -> inference_pb2.GenerateRequest:
        sampling = inference_pb2.SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=self.seed,
            stop=self.stop,
        )
        if not self.chat:
            return inference_pb2.GenerateRequest(prompt=self.prompt, sampling=sampling)
        message = inference_pb2.ChatMessage(role="user", content=self.prompt)
        chat = inference_pb2.ChatMessages(messages=[message])
        return inference_pb2.GenerateRequest(chat=chat, sampling=sampling)


async def stream_answer(channel: grpc.aio.Channel, ask: Ask) -> Answer:
    """Print the text of an answer as it comes."""
    answer = Answer()
    async for text in generate(channel, ask.request(), answer):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return answer


async def _ask(address: str, ask: Ask, as_json: bool, show_timeline: bool) -> None:
    async with connected(address) as channel:
        if as_json:
            answer = Answer()
            async for _ in generate(channel, ask.request(), answer):
                pass
            print(json.dumps(answer.as_dict(), ensure_ascii=False))
        else:
            answer = await stream_answer(channel, ask)
    if show_timeline:
        Console(stderr=True).print(draw(answer.finished.timeline, answer.finished.usage))


def run(address: str, ask: Ask, *, as_json: bool, show_timeline: bool) -> None:
    """Raises: ServiceError or grpc.aio.AioRpcError: there is no answer, and why."""
    asyncio.run(_ask(address, ask, as_json, show_timeline))
