"""``kvrelay demo``: a cluster of one prefill and one decode instance gives one answer.

Up on free ports, a chat prompt through gRPC ``Generate``, the answer as it comes, where its time
went, down again. Called by ``make demo``.
"""

from collections.abc import Mapping

import grpc
from rich.console import Console

from engine.config import EngineConfig
from services.cli.client import Answer, connected, generate
from services.cli.generate import Ask, stream_answer
from services.cli.serve import Counts, make_plan, num_cores, run_with_cluster
from services.cli.timeline import draw
from services.launch.forking import local_launcher
from services.runtime.settings import RouterConfig

PROMPT = (
    "Explain in a few sentences what a relay race is, how the runners hand over the baton, "
    "and why the next runner starts to run before the baton arrives."
)
MAX_TOKENS = 128


def run(model: str) -> None:
    """Raises: LaunchError, ServiceError or grpc.aio.AioRpcError: what went wrong."""
    roles = Counts().roles()
    engine = EngineConfig(threads=max(1, num_cores() // len(roles)))
    router = RouterConfig(model=model, grpc_port=0, http_port=0, disaggregate_from=0)
    plan = make_plan(router, roles, engine, transport="auto")
    run_with_cluster(plan, lambda: local_launcher(engine.device), _answer_one)


async def _warm_up(channel: grpc.aio.Channel) -> None:
    """The first handoff of two instances connects them; the one that is shown should not."""
    async for _ in generate(channel, Ask("Hello", max_tokens=2).request(), Answer()):
        pass


async def _answer_one(addresses: Mapping[str, str]) -> None:
    console = Console()
    console.print(f"[dim]{PROMPT}[/]\n")
    async with connected(addresses["grpc"]) as channel:
        await _warm_up(channel)
        answer = await stream_answer(channel, Ask(PROMPT, chat=True, max_tokens=MAX_TOKENS))
    console.print()
    console.print(draw(answer.finished.timeline, answer.finished.usage))
