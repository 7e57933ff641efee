"""The first words on a new connection: both ends say who they are, once, and check the other.

After it, everything on the connection is trusted to come from that process; a restarted one has
another instance id and never gets past here. Used by the shells.
"""

import asyncio
from dataclasses import dataclass

from kvtransfer.errors import BadFrame, LinkLost
from kvtransfer.handoff.frames import Refuse
from kvtransfer.layout import KvLayout
from kvtransfer.transports.interface import Connect, ControlStream, Link
from kvtransfer.wire import check_hello, frame_to_proto, hello
from protos import kv_transfer_pb2 as pb

HELLO_S = 4.0
"""Dialling and both Hellos together; shorter than a lease, so that the reason is told."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What an instance says of itself."""

    instance_id: str
    """New with every process start."""
    model_digest: str
    layout: KvLayout


async def dial(connect: Connect, us: Identity, address: str, target_instance_id: str) -> Link:
    """A link to the target that has this id, and our model and KV layout.

    Raises:
        LinkLost: it cannot be reached, or does not match; the reason.
    """
    link: Link | None = None
    try:
        async with asyncio.timeout(HELLO_S):
            link = await connect(address, us.instance_id, target_instance_id)
            await _say_hello(link, us, target_instance_id)
            return link
    except BaseException as error:
        if link is not None:
            await link.close()
        if isinstance(error, TimeoutError):
            raise LinkLost(f"no answer within {HELLO_S:g} s") from error
        if isinstance(error, BadFrame):
            raise LinkLost(str(error)) from error
        raise


async def _say_hello(link: Link, us: Identity, target_instance_id: str) -> None:
    ours = hello(us.instance_id, target_instance_id, us.model_digest, us.layout)
    await link.send(ours)
    theirs = await link.receive()
    if theirs is None:
        raise LinkLost("the target hung up before its Hello")
    check_not_refused(theirs)
    if (difference := check_hello(ours, theirs)) is not None:
        raise LinkLost(f"the target does not match: {difference}")


async def hear_hello(stream: ControlStream, us: Identity) -> tuple[str, pb.ControlFrame]:
    """The id of the source that dialled, and our Hello to it; a mismatch is told to the source.

    Raises:
        LinkLost: it hung up, said nothing, or does not match; the reason.
    """
    try:
        async with asyncio.timeout(HELLO_S):
            theirs = await stream.receive()
            if theirs is None:
                raise LinkLost("the source hung up before its Hello")
            source_id = theirs.hello.source_instance_id
            ours = hello(source_id, us.instance_id, us.model_digest, us.layout)
            difference = _difference(ours, theirs)
            if difference is None:
                return source_id, ours
            await stream.send(frame_to_proto(Refuse(b"", difference)))
            raise LinkLost(difference)
    except TimeoutError as error:
        raise LinkLost(f"no Hello within {HELLO_S:g} s") from error


def _difference(ours: pb.ControlFrame, theirs: pb.ControlFrame) -> str | None:
    try:
        return check_hello(ours, theirs)
    except BadFrame as error:
        return str(error)


def check_not_refused(message: pb.ControlFrame) -> None:
    """Raises LinkLost when the peer ends the whole stream, saying why."""
    if message.WhichOneof("frame") == "refuse" and not message.refuse.handoff_id:
        raise LinkLost(f"the peer refused it: {message.refuse.reason}")
