"""How bytes move between a source and a target: what every transport gives both ends.

The source dials. One link is one control stream and one data stream of their own, so that bulk
never delays a word. Transports know frames only as messages; ids and handoffs are not theirs.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from protos import kv_transfer_pb2 as pb


class ControlStream(Protocol):
    """One end of a control stream: ordered, reliable until it breaks."""

    async def send(self, frame: pb.ControlFrame) -> None:
        """Raises LinkLost."""
        ...

    async def receive(self) -> pb.ControlFrame | None:
        """The next frame; None: the peer ended the stream in order. Raises LinkLost."""
        ...


class Link(ControlStream, Protocol):
    """The source's end of a pair: its control stream, and the data stream beside it.

    When either stream breaks, both do: ``receive`` and ``send_data`` raise LinkLost.
    """

    @property
    def is_bare(self) -> bool:
        """Bytes stay in this host's memory: nothing on the way can damage them."""
        ...

    @property
    def message_bytes(self) -> int:
        """How long a message should be at most: longer ones cost more than they save."""
        ...

    async def send_data(
        self, buffers: Sequence[bytes | memoryview], on_read: Callable[[], None]
    ) -> None:
        """Send one message; returns when the transport can take the next. Raises LinkLost.

        Calls ``on_read`` once the buffers will not be read any more.
        """
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...


class Connect(Protocol):
    """Dials a target."""

    async def __call__(
        self, address: str, source_instance_id: str, target_instance_id: str
    ) -> Link:
        """Raises LinkLost."""
        ...


class KvEndpoint(Protocol):
    """What a transport serves: a target, as streams come in."""

    async def serve_control(self, stream: ControlStream) -> None:
        """Runs until the stream ends."""
        ...

    async def serve_data(
        self, source_instance_id: str, messages: AsyncIterator[bytes | memoryview]
    ) -> None:
        """Runs until the stream ends. A message is not looked at after the next is asked for.

        Raises BadFrame or LinkLost to break it."""
        ...
