"""The target's shell: answers offers, puts bytes where they were granted, says when all landed.

    expect ──▶ offered ──▶ grant | wait | refuse ──▶ first ──▶ landed
               (await)                               (await)   (await)

All decisions are ``handoff.target``'s; this file owns streams, memory and the clock. It knows
nothing of decode: whoever has blocks to fill may be a target. The services call ``expect``; a
transport brings streams to ``serve_control`` and ``serve_data``. Everything runs on the event
loop, so a block is written between two turns of it, never across one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count

from kvtransfer.conversation import Outbox, TaskSet, Watched, converse
from kvtransfer.errors import BadFrame, KvTransferError, LinkLost
from kvtransfer.handoff.frames import First, Frame, Offer, Send
from kvtransfer.handoff.records import TargetRecord
from kvtransfer.handoff.table import HandoffState
from kvtransfer.handoff.target import Action, TargetMachine
from kvtransfer.handshake import Identity, hear_hello
from kvtransfer.layout import KvLayout
from kvtransfer.memory import KvMemory, copy_bytes, regions
from kvtransfer.stats import EndpointStats
from kvtransfer.sweep import sweep
from kvtransfer.transports.interface import ControlStream
from kvtransfer.wire import DataFrame, split_message

logger = logging.getLogger(__name__)


class TargetHandoff:
    """One handoff at its target; made by ``KvTarget.expect``."""

    def __init__(self, target: "KvTarget", record: TargetRecord) -> None:
        self._target = target
        self._watched = Watched(record)

    @property
    def handoff_id(self) -> bytes:
        return self._watched.record.handoff_id

    @property
    def state(self) -> HandoffState:
        return self._watched.record.state

    @property
    def num_bytes(self) -> int:
        """Bytes received so far."""
        return self._watched.record.num_bytes

    async def offered(self) -> Offer:
        """What the source offers; fails after 5 s without an offer.

        Raises:
            HandoffCancelled, HandoffFailed
        """
        record = await self._watched.until(lambda r: r.offer is not None)
        assert record.offer is not None
        return record.offer

    def wait(self) -> None:
        """Tell the source that there are no blocks now; it keeps offering."""
        self._target.act(self._target.machine.wait(self.handoff_id))

    def grant(self, block_table: Sequence[int], num_held_tokens: int) -> None:
        """These blocks, one for each block of the prompt, are this handoff's until ``drained``.

        Args:
            block_table: block ids of the whole prompt, held ones included; more are ignored.
            num_held_tokens: prompt tokens whose KV they hold already; whole blocks, or all.

        Raises:
            HandoffCancelled, HandoffFailed: it is over; the blocks were never at risk.
            KvTransferError: the blocks do not fit the offer.
        """
        self._watched.check()
        target = self._target
        target.act(
            target.machine.grant(self.handoff_id, block_table, num_held_tokens, target.clock())
        )

    def refuse(self, reason: str) -> None:
        """Never; before ``grant`` only."""
        self._target.act(self._target.machine.refuse(self.handoff_id, reason, self._target.clock()))

    async def first(self) -> First:
        """The first output token; it usually comes before the bytes.

        Raises:
            HandoffCancelled, HandoffFailed
        """
        record = await self._watched.until(lambda r: r.first is not None)
        assert record.first is not None
        return record.first

    async def landed(self) -> None:
        """All of the prompt's KV is in the granted blocks, and the first token is known.

        Raises:
            HandoffCancelled, HandoffFailed: then await ``drained`` before the blocks are let go.
        """
        await self._watched.until(lambda r: r.state is HandoffState.LANDED)

    def cancel(self, reason: str) -> None:
        """Give it up; idempotent. The blocks stay held until ``drained``."""
        self._target.cancel(self.handoff_id, reason)

    async def drained(self) -> None:
        """Over, however it ended, and nothing writes its blocks any more."""
        await self._watched.drained()

    def update(self, record: TargetRecord) -> None:
        """The machine moved it. Called by ``KvTarget``."""
        self._watched.update(record)


class _Session:
    """One connection from one source process."""

    def __init__(self, key: str, source_instance_id: str) -> None:
        self.key = key
        self.source_instance_id = source_instance_id
        self.outbox = Outbox()
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()


class KvTarget:
    """The receiving end of an instance: all its handoffs, from any number of sources."""

    def __init__(
        self,
        instance_id: str,
        model_digest: str,
        layout: KvLayout,
        memory: KvMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self.clock = clock
        self.machine = TargetMachine(layout)
        self._identity = Identity(instance_id, model_digest, layout)
        self._memory = memory
        self._handoffs: dict[bytes, TargetHandoff] = {}
        self._sessions: dict[str, _Session] = {}  # by source instance id
        self._sessions_by_key: dict[str, _Session] = {}
        self._session_numbers = count(1)
        self._tasks = TaskSet()
        self._is_sweeping = False
        self._is_closed = False
        self._num_bytes = 0

    def expect(self, handoff_id: bytes, request_id: str) -> TargetHandoff:
        """A request wants this handoff; its offer may come before or after.

        Raises:
            KvTransferError: the id is expected already, or we are closed.
        """
        if self._is_closed:
            raise KvTransferError("this target is shut down")
        self._start_sweep()
        actions = self.machine.expect(handoff_id, request_id, self.clock())
        record = next(a.record for a in actions if not isinstance(a, Send))
        handoff = TargetHandoff(self, record)
        if not record.drained:
            self._handoffs[handoff_id] = handoff
        self.act(actions)
        return handoff

    def cancel(self, handoff_id: bytes, reason: str) -> None:
        """Give a handoff up; one that is not known yet will be refused when it comes."""
        self.act(self.machine.cancel(handoff_id, reason, self.clock()))

    def stats(self) -> EndpointStats:
        """Totals since the start."""
        ledger = self.machine.ledger
        return EndpointStats(
            len(ledger.live), self._num_bytes, dict(ledger.outcomes), dict(ledger.refused_frames)
        )

    async def aclose(self) -> None:
        """Cancel everything, drain, hang up; idempotent."""
        self._is_closed = True
        for handoff_id in list(self.machine.ledger.live):
            self.cancel(handoff_id, "the target shuts down")
        await asyncio.gather(*(handoff.drained() for handoff in list(self._handoffs.values())))
        sessions = list(self._sessions_by_key.values())
        for session in sessions:
            self._lose(session, "the target shuts down")
        for session in sessions:
            await session.ended.wait()
        await self._tasks.cancel()

    # The server half: transports bring streams

    async def serve_control(self, stream: ControlStream) -> None:
        """A source dialled: check its Hello, then talk until either stream breaks."""
        self._start_sweep()
        try:
            source_id, ours = await hear_hello(stream, self._identity)
        except LinkLost as error:
            logger.info("a source did not get past its Hello: %s", error)
            return
        if self._is_closed:
            return
        session = self._admit(source_id)
        try:
            await stream.send(ours)
            await converse(
                stream,
                session.outbox,
                lambda frame: self._on_frame(session, frame),
                session.broken,
                lambda reason: self._lose(session, reason),
            )
        except LinkLost as error:
            logger.info("a source was gone before our Hello: %s", error)
        finally:
            self._lose(session, "the connection ended")
            session.ended.set()

    async def serve_data(
        self, source_instance_id: str, messages: AsyncIterator[bytes | memoryview]
    ) -> None:
        """A source's data stream; lives and dies with its control stream.

        Raises:
            BadFrame: a message is no frame; LinkLost: there is no control stream.
        """
        session = self._sessions.get(source_instance_id)
        if session is None:
            raise LinkLost("a data stream without a control stream beside it")
        reason = "the data stream ended"
        try:
            async for message in messages:
                if session.broken.done():
                    raise LinkLost(session.broken.result())
                for frame in split_message(message):
                    self._land(session, frame)
        except BadFrame as error:
            reason = str(error)
            raise
        finally:
            self._lose(session, reason)

    # Inside

    def _admit(self, source_instance_id: str) -> _Session:
        """A new connection; one that the same process had before is over."""
        old = self._sessions.get(source_instance_id)
        if old is not None:
            self._lose(old, "the source connected anew")
        key = f"{source_instance_id}#{next(self._session_numbers)}"
        session = _Session(key, source_instance_id)
        self._sessions[source_instance_id] = session
        self._sessions_by_key[key] = session
        return session

    def _land(self, session: _Session, frame: DataFrame) -> None:
        """Put one data frame where it was granted."""
        handoff_id, span, now = frame.handoff_id, frame.span, self.clock()
        region_bytes = self.layout.region_bytes
        if not frame.is_intact or len(frame.payload) != span.num_blocks * region_bytes:
            reason = "a data frame came damaged"
            self.act(self.machine.damaged(session.key, handoff_id, reason, now))
            return
        block_ids, actions = self.machine.begin_write(session.key, handoff_id, span, now)
        self.act(actions)
        if not block_ids:
            return
        try:
            offset = 0
            for view in regions(self._memory, span.layer, block_ids):
                copy_bytes(view, frame.payload[offset : offset + view.nbytes])
                offset += view.nbytes
            self._num_bytes += offset
        except Exception:
            reason = "the target could not write its own blocks"
            logger.exception("handoff %s: %s", handoff_id.hex(), reason)
            self.act(self.machine.damaged(session.key, handoff_id, reason, now))
        finally:
            self.act(self.machine.end_write(handoff_id, now))

    def _on_frame(self, session: _Session, frame: Frame) -> None:
        self.act(self.machine.on_frame(session.key, frame, self.clock()))

    def _lose(self, session: _Session, reason: str) -> None:
        """The connection broke: all its handoffs fail now."""
        if self._sessions_by_key.pop(session.key, None) is None:
            return
        if self._sessions.get(session.source_instance_id) is session:
            del self._sessions[session.source_instance_id]
        session.broken.set_result(reason)
        reason = f"connection from {session.source_instance_id} lost: {reason}"
        logger.info("%s", reason)
        self.act(self.machine.lose_peer(session.key, reason, self.clock()))

    def _start_sweep(self) -> None:
        if not self._is_sweeping:
            self._is_sweeping = True
            self._tasks.start(sweep(self.clock, lambda now: self.act(self.machine.tick(now))))

    def act(self, actions: list[Action]) -> None:
        """Carry out what the machine asks. Called by the handoffs too."""
        for action in actions:
            if isinstance(action, Send):
                session = self._sessions_by_key.get(action.peer)
                if session is not None:
                    session.outbox.post(action.frame)
                continue
            record = action.record
            handoff = self._handoffs.get(record.handoff_id)
            if handoff is not None:
                handoff.update(record)
                if record.drained:
                    del self._handoffs[record.handoff_id]
