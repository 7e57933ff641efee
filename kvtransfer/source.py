"""The source's shell: offers KV, sends it layer by layer, lets go when it has landed.

    offer ──▶ granted ──▶ layer_ready … ──▶ first ──▶ released
              (await)     (engine thread)   (loop)    (await)

All decisions are ``handoff.source``'s; this file owns tasks, connections and the clock. It knows
nothing of prefill: whoever holds KV under a block table may be a source. Called by the services;
everything but ``layer_ready`` is called on the event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from itertools import count

from kvtransfer.conversation import LAST_WORD_S, Outbox, TaskSet, Watched, converse
from kvtransfer.errors import KvTransferError, LinkLost
from kvtransfer.handoff.frames import First, Frame, Offer, Send, Span
from kvtransfer.handoff.records import SourceRecord
from kvtransfer.handoff.source import Action, SourceMachine
from kvtransfer.handoff.table import HandoffState
from kvtransfer.handshake import Identity, dial
from kvtransfer.layout import KvLayout
from kvtransfer.memory import KvMemory, regions
from kvtransfer.readiness import Readiness
from kvtransfer.stats import BusyTime, EndpointStats, HandoffStats, LayerSend
from kvtransfer.sweep import sweep
from kvtransfer.transports.interface import Connect, Link
from kvtransfer.wire import encode_data, max_blocks_per_frame

logger = logging.getLogger(__name__)

MAX_SENDS = 4096
"""Most that is remembered of one handoff."""
_SENDING = (HandoffState.GRANTED, HandoffState.SENDING)


class SourceHandoff:
    """One handoff at its source; made by ``KvSource.offer``."""

    def __init__(self, source: "KvSource", record: SourceRecord, blocks: Sequence[int]) -> None:
        self._source = source
        self._watched = Watched(record)
        self._readiness = Readiness(source.layout.num_layers)
        self._blocks = tuple(blocks)
        self._busy = BusyTime()
        self._written_s = [0.0] * source.layout.num_layers
        self._sends: list[tuple[int, float, float, float]] = []
        self._offered_s = source.clock()
        self._granted_s: float | None = None
        self._prefill_end_s: float | None = None
        self._sent_s: float | None = None

    @property
    def handoff_id(self) -> bytes:
        return self._watched.record.handoff_id

    @property
    def request_id(self) -> str:
        return self._watched.record.offer.request_id

    @property
    def state(self) -> HandoffState:
        return self._watched.record.state

    async def granted(self) -> int:
        """Prompt tokens the target holds already; the rest will be sent as it gets ready.

        Raises:
            HandoffRefused, HandoffCancelled, HandoffFailed
        """
        record = await self._watched.until(lambda r: r.state is not HandoffState.OFFERED)
        return record.num_held_tokens

    def layer_ready(self, layer: int, num_tokens: int) -> None:
        """The KV of prompt tokens 0 .. num_tokens - 1 of ``layer`` is written; from any thread.

        Tokens found in the source's own prefix cache must be marked like computed ones.
        """
        self._written_s[layer] = self._source.clock()
        self._readiness.mark(layer, num_tokens)

    def first(
        self, position: int, token_id: int, num_cached_tokens: int = 0, details: bytes = b""
    ) -> None:
        """The first output token is sampled: it leaves at once, ahead of bytes.

        Args:
            num_cached_tokens: prompt tokens that were in the source's own prefix cache.
            details: for whoever asked for the handoff; not read on the way.
        """
        self.prefill_ended()
        first = First(self.handoff_id, position, token_id, num_cached_tokens, details)
        self._source.set_first(first)

    def prefill_ended(self) -> None:
        """Transfer time from here on is not hidden behind compute. ``first`` implies it."""
        if self._prefill_end_s is None:
            self._prefill_end_s = self._source.clock()

    async def released(self) -> HandoffStats:
        """All of it has landed; the blocks may be let go.

        Raises:
            HandoffRefused, HandoffCancelled, HandoffFailed: then await ``drained`` before the
                blocks are let go.
        """
        record = await self._watched.until(lambda r: r.state is HandoffState.RELEASED)
        total_s = self._busy.total_s()
        end_s = self._prefill_end_s
        granted_s = self._granted_s or self._offered_s
        return HandoffStats(
            num_bytes=record.num_bytes,
            num_frames=record.num_frames,
            num_held_tokens=record.num_held_tokens,
            grant_s=granted_s - self._offered_s,
            transfer_s=total_s,
            hidden_s=total_s if end_s is None else self._busy.before_s(end_s),
            sends=tuple(
                LayerSend(layer, *(moment_s - granted_s for moment_s in moments))
                for layer, *moments in self._sends
            ),
        )

    def cancel(self, reason: str) -> None:
        """Give it up; idempotent. The blocks stay held until ``drained``."""
        self._source.cancel(self.handoff_id, reason)

    async def drained(self) -> None:
        """Over, however it ended, and nothing reads its blocks any more."""
        await self._watched.drained()

    def update(self, record: SourceRecord) -> None:
        """The machine moved it. Called by ``KvSource``."""
        now = self._source.clock()
        if record.state is not HandoffState.OFFERED and self._granted_s is None:
            self._granted_s = now
        if record.state is HandoffState.SENT and self._sent_s is None:
            self._sent_s = now
        if record.state is HandoffState.RELEASED and record.num_frames and self._sent_s is not None:
            self._busy.add(self._sent_s, now)
        if record.state not in (HandoffState.OFFERED, *_SENDING):
            self._readiness.close()
        self._watched.update(record)

    async def send(self, peer: "_Peer", memory: KvMemory) -> None:
        """Send what is readable until all is sent or the handoff is over. Run by ``KvSource``."""
        while self.state in _SENDING:
            async with peer.sending:
                spans = self._next_spans(peer.link)
                if spans:
                    await self._send_message(peer, memory, spans)
            if not spans:
                await self._readiness.changed()

    def _next_spans(self, link: Link | None) -> list[Span]:
        """What goes into the next message: as much as is readable and pays, over many layers."""
        if link is None:
            return []
        spans: list[Span] = []
        region_bytes = self._source.layout.region_bytes
        room = max(link.message_bytes, region_bytes)
        readable = self._readiness.snapshot()
        while max_blocks := min(room // region_bytes, self._source.max_blocks):
            span = self._source.machine.next_read(self.handoff_id, readable, max_blocks)
            if span is None:
                break
            spans.append(span)
            room -= span.num_blocks * region_bytes
        return spans

    async def _send_message(self, peer: "_Peer", memory: KvMemory, spans: list[Span]) -> None:
        begin_s = self._source.clock()
        reading = True

        def read_ended() -> None:
            nonlocal reading
            if reading:
                reading = False
                for _ in spans:
                    self._source.end_read(self.handoff_id)

        try:
            if peer.link is None:
                raise LinkLost("the connection is closed")
            message: list[bytes | memoryview] = []
            for span in spans:
                block_ids = self._blocks[span.first_block : span.first_block + span.num_blocks]
                views = regions(memory, span.layer, block_ids)
                message += encode_data(self.handoff_id, span, views, peer.link.is_bare)
            await peer.link.send_data(message, read_ended)
        except LinkLost as error:
            self._source.lose_peer(peer, str(error))
        except Exception:
            reason = "the source could not read its own blocks"
            logger.exception("handoff %s: %s", self.handoff_id.hex(), reason)
            self.cancel(reason)
        finally:
            read_ended()
            end_s = self._source.clock()
            self._busy.add(begin_s, end_s)
            room = MAX_SENDS - len(self._sends)
            self._sends += [
                (span.layer, self._written_s[span.layer], begin_s, end_s) for span in spans[:room]
            ]


class _Peer:
    """One connection to one target process; a new one is made for every connect."""

    def __init__(self, key: str, address: str, target_instance_id: str) -> None:
        self.key = key
        self.address = address
        self.target_instance_id = target_instance_id
        self.outbox = Outbox()
        self.sending = asyncio.Lock()
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.link: Link | None = None
        self.task: asyncio.Task[None] | None = None


class KvSource:
    """The sending end of an instance: all its handoffs, to any number of targets."""

    def __init__(
        self,
        instance_id: str,
        model_digest: str,
        layout: KvLayout,
        memory: KvMemory,
        connect: Connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self.clock = clock
        self.machine = SourceMachine(layout)
        self._identity = Identity(instance_id, model_digest, layout)
        self.max_blocks = max_blocks_per_frame(layout)
        self._memory = memory
        self._connect = connect
        self._handoffs: dict[bytes, SourceHandoff] = {}
        self._peers: dict[tuple[str, str], _Peer] = {}
        self._peers_by_key: dict[str, _Peer] = {}
        self._peer_numbers = count(1)
        self._tasks = TaskSet()
        self._is_sweeping = False
        self._is_closed = False
        self._num_bytes = 0

    def announce(self, handoff_id: bytes, target_address: str, target_instance_id: str) -> None:
        """An offer will come, when its turn has come: the target keeps waiting for it.

        Call ``offer`` or ``cancel`` in the end.
        """
        self._start_sweep()
        self.machine.announce(self._peer(target_address, target_instance_id).key, handoff_id)

    def offer(
        self,
        handoff_id: bytes,
        target_address: str,
        target_instance_id: str,
        request_id: str,
        num_tokens: int,
        block_hashes: Sequence[bytes],
        block_table: Sequence[int],
    ) -> SourceHandoff:
        """Begin a handoff of the KV of ``num_tokens`` prompt tokens, which is or will be in
        ``block_table``, to the instance at ``target_address``.

        Raises:
            KvTransferError: the id is in use, the table is too short, or we are closed.
        """
        if self._is_closed:
            raise KvTransferError("this source is shut down")
        if num_tokens < 1:
            raise KvTransferError("there is nothing to hand over: no tokens")
        num_blocks = self.layout.num_blocks_for(num_tokens)
        if len(block_table) < num_blocks:
            raise KvTransferError(f"{num_tokens} tokens need {num_blocks} blocks")
        offer = Offer(handoff_id, request_id, num_tokens, tuple(block_hashes))
        self._start_sweep()
        peer = self._peer(target_address, target_instance_id)
        actions = self.machine.offer(peer.key, offer, self.clock())
        record = next(a.record for a in actions if not isinstance(a, Send))
        handoff = SourceHandoff(self, record, block_table[:num_blocks])
        if not record.drained:
            self._handoffs[handoff_id] = handoff
        self._act(actions)
        return handoff

    def cancel(self, handoff_id: bytes, reason: str) -> None:
        """Give a handoff up; one that has not been offered yet will end at once when it is."""
        self._act(self.machine.cancel(handoff_id, reason, self.clock()))

    def stats(self) -> EndpointStats:
        """Totals since the start."""
        ledger = self.machine.ledger
        return EndpointStats(
            len(ledger.live), self._num_bytes, dict(ledger.outcomes), dict(ledger.refused_frames)
        )

    async def aclose(self) -> None:
        """Cancel everything, drain, hang up; idempotent."""
        self._is_closed = True
        handoffs = list(self._handoffs.values())
        for handoff in handoffs:
            handoff.cancel("the source shuts down")
        await asyncio.gather(*(handoff.drained() for handoff in handoffs))
        peers = list(self._peers_by_key.values())
        for peer in peers:
            self.lose_peer(peer, "the source shuts down")
        if peers:
            await asyncio.wait([peer.task for peer in peers if peer.task], timeout=LAST_WORD_S)
        await self._tasks.cancel()

    # Called by the handoffs

    def set_first(self, first: First) -> None:
        self._act(self.machine.set_first(first, self.clock()))

    def end_read(self, handoff_id: bytes) -> None:
        self._act(self.machine.end_read(handoff_id, self.clock()))

    def lose_peer(self, peer: _Peer, reason: str) -> None:
        """The connection broke: all its handoffs fail now; the next offer dials anew."""
        if self._peers_by_key.pop(peer.key, None) is None:
            return
        del self._peers[peer.address, peer.target_instance_id]
        reason = f"connection to {peer.address} lost: {reason}"
        logger.info("%s", reason)
        peer.broken.set_result(reason)
        self._act(self.machine.lose_peer(peer.key, reason, self.clock()))

    # Inside

    def _start_sweep(self) -> None:
        if not self._is_sweeping:
            self._is_sweeping = True
            self._tasks.start(sweep(self.clock, lambda now: self._act(self.machine.tick(now))))

    def _peer(self, address: str, target_instance_id: str) -> _Peer:
        peer = self._peers.get((address, target_instance_id))
        if peer is None:
            key = f"{target_instance_id}#{next(self._peer_numbers)}"
            peer = _Peer(key, address, target_instance_id)
            self._peers[address, target_instance_id] = peer
            self._peers_by_key[key] = peer
            peer.task = self._tasks.start(self._run_peer(peer))
        return peer

    async def _run_peer(self, peer: _Peer) -> None:
        reason = "the connection ended"
        try:
            peer.link = await dial(
                self._connect, self._identity, peer.address, peer.target_instance_id
            )
            await converse(
                peer.link,
                peer.outbox,
                lambda frame: self._on_frame(peer, frame),
                peer.broken,
                lambda reason: self.lose_peer(peer, reason),
            )
        except LinkLost as error:
            reason = str(error)
        finally:
            self.lose_peer(peer, reason)
            if peer.link is not None:
                await peer.link.close()

    def _on_frame(self, peer: _Peer, frame: Frame) -> None:
        self._act(self.machine.on_frame(peer.key, frame, self.clock()))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                peer = self._peers_by_key.get(action.peer)
                if peer is not None:
                    peer.outbox.post(action.frame)
                continue
            record = action.record
            handoff = self._handoffs.get(record.handoff_id)
            if handoff is None:
                continue
            was_offered = handoff.state is HandoffState.OFFERED
            handoff.update(record)
            if was_offered and record.state in _SENDING:
                peer = self._peers_by_key[record.peer]
                self._tasks.start(handoff.send(peer, self._memory))
            if record.drained:
                del self._handoffs[record.handoff_id]
                self._num_bytes += record.num_bytes
