"""Which transport a pair uses: the source offers its memory in its Hello, the target answers.

    source  make_ring ──▶ Hello(shared_memory) ──▶ target  map_ring
            settle    ◀── Hello(transport, transport_reason) ◀──

Whoever may map memory proves it by mapping it; no host names are compared. ``remote`` calls this
around the Hellos that pass through it; nothing above it knows.
"""

import logging

from kvtransfer.errors import LinkLost
from kvtransfer.transports.shared_memory import Ring, RingReader
from protos import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

TRANSPORTS = ("auto", "grpc", "shared_memory")
"""auto takes shared memory where both ends can, else gRPC."""


def make_ring(transport: str) -> Ring | None:
    """The source's memory for one connection; None: bytes go over gRPC.

    Raises:
        LinkLost: shared memory is demanded, and this system has none.
    """
    if transport == "grpc":
        return None
    try:
        return Ring()
    except OSError as error:
        if transport == "shared_memory":
            raise LinkLost(f"no shared memory here: {error}; use --transport auto") from error
        logger.info("KV goes over grpc: no shared memory here: %s", error)
        return None


def map_ring(transport: str, hello: pb.Hello) -> tuple[RingReader | None, str]:
    """The target's view of the source's memory, or why there is none.

    Raises:
        LinkLost: shared memory is demanded, and cannot be had.
    """
    if transport == "grpc":
        return None, "the target is started with --transport grpc"
    reason = "the source offers no shared memory"
    if hello.HasField("shared_memory"):
        try:
            return RingReader(hello.shared_memory), ""
        except OSError as error:
            reason = str(error)
    if transport == "shared_memory":
        raise LinkLost(f"the target is started with --transport shared_memory: {reason}")
    return None, reason


def settle(transport: str, address: str, answer: pb.Hello) -> bool:
    """Whether the target took our memory; says in the log what was chosen, and why.

    Raises:
        LinkLost: shared memory is demanded, and the target could not take it.
    """
    if answer.transport == "shared_memory":
        logger.info("KV to %s goes over shared_memory: both ends are on one host", address)
        return True
    reason = answer.transport_reason or "the target says nothing of shared memory"
    if transport == "shared_memory":
        raise LinkLost(f"--transport shared_memory: {reason}; use --transport auto")
    if transport == "auto":
        logger.info("KV to %s goes over grpc: %s", address, reason)
    return False
