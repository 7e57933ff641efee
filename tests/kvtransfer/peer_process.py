"""A target or source in a process of its own, for tests that kill it.

    python -m tests.kvtransfer.peer_process target INSTANCE_ID
    python -m tests.kvtransfer.peer_process source ADDRESS TARGET_INSTANCE_ID HANDOFF_ID_HEX [grpc]

A target prints ``port N``, then grants every handoff whose id comes in as a line on stdin, and
prints ``landed ID``. A source offers 8 tokens, sends all layers but one, prints ``sending`` and
waits to be killed.
"""

import asyncio
import sys

import grpc

from kvtransfer.transports.mounted import add_kv_transfer_to_server
from kvtransfer.transports.remote import (
    SERVER_OPTIONS,
    RemoteConnector,
)
from tests.kvtransfer.fakes import LAYOUT, FakeMemory, make_source, make_target


async def run_target(instance_id: str) -> None:
    target = make_target(FakeMemory(), instance_id)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_kv_transfer_to_server(target, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"port {port}", flush=True)
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        landing = target.expect(bytes.fromhex(line), "r1")
        offer = await landing.offered()
        landing.grant(range(LAYOUT.num_blocks_for(offer.num_tokens)), 0)
        await landing.landed()
        print(f"landed {line}", flush=True)


async def run_source(
    address: str, target_id: str, handoff_id: str, transport: str = "auto"
) -> None:
    source = make_source(FakeMemory(), RemoteConnector(transport=transport))
    sending = source.offer(bytes.fromhex(handoff_id), address, target_id, "r1", 8, [], [0, 1])
    await sending.granted()
    for layer in range(LAYOUT.num_layers - 1):
        sending.layer_ready(layer, 8)
    print("sending", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    asyncio.run({"target": run_target, "source": run_source}[role](*arguments))
