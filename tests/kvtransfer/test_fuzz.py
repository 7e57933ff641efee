"""Whatever a peer says, whenever: the machines count it, survive it, and come to rest."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.errors import IllegalTransition, KvTransferError
from kvtransfer.handoff.frames import (
    TOMBSTONE_S,
    Cancel,
    Cancelled,
    First,
    Frame,
    Grant,
    Landed,
    Offer,
    Refuse,
    Renew,
    Sent,
    Span,
    Wait,
)
from kvtransfer.handoff.table import HandoffState
from tests.kvtransfer.duo import LAYOUT, TOKENS, Duo, S

IDS = st.sampled_from([b"a" * 16, b"b" * 16, b"c" * 16])
PEERS = st.sampled_from([S, "stranger"])
SMALL = st.integers(0, 12)
FIRSTS = st.builds(First, IDS, SMALL, SMALL)
FRAMES = st.one_of(
    st.builds(Offer, IDS, st.sampled_from(["r", "q"]), st.integers(1, 12)),
    st.builds(Grant, IDS, SMALL),
    st.builds(Wait, IDS),
    st.builds(Refuse, IDS, st.just("no")),
    FIRSTS,
    FIRSTS.flatmap(
        lambda first: st.builds(
            Sent,
            st.just(first.handoff_id),
            SMALL,
            st.sampled_from([0, 5, LAYOUT.block_bytes, 3 * LAYOUT.block_bytes]),
            st.just(first),
        )
    ),
    st.builds(Landed, IDS),
    st.builds(Cancel, IDS, st.just("gone")),
    st.builds(Cancelled, IDS),
    st.builds(Renew, st.lists(IDS, max_size=3).map(tuple)),
)
Step = Callable[[Duo], None]


def local(call: Callable[[Duo], object]) -> Step:
    """A command of our own side; misuse raises the error that says so, and nothing else."""

    def step(duo: Duo) -> None:
        try:
            call(duo)
        except IllegalTransition:
            raise
        except KvTransferError:
            return

    return step


def hear(side: str, peer: str, frame: Frame) -> Step:
    return lambda duo: (duo.to_source if side == "source" else duo.to_target)(frame, peer=peer)


def grant(duo: Duo, i: bytes, held: int) -> None:
    record = duo.target.ledger.live.get(i)
    if record is not None and record.state is HandoffState.EXPECTED:
        duo.take("target", duo.target.grant(i, (7, 8, 9), held, duo.now))


def data(duo: Duo, peer: str, i: bytes, span: Span) -> None:
    blocks, actions = duo.target.begin_write(peer, i, span, duo.now)
    duo.take("target", actions)
    assert len(blocks) in (0, span.num_blocks)
    if blocks:
        duo.take("target", duo.target.end_write(i, duo.now))


def read(duo: Duo, i: bytes) -> None:
    if duo.source.next_read(i, [TOKENS] * 2, 2) is not None:
        duo.take("source", duo.source.end_read(i, duo.now))


STEPS = st.one_of(
    st.builds(hear, st.sampled_from(["source", "target"]), PEERS, FRAMES),
    st.builds(
        lambda i: local(
            lambda d: d.take("source", d.source.offer(S, Offer(i, "r", TOKENS), d.now))
        ),
        IDS,
    ),
    st.builds(lambda i: local(lambda d: d.take("target", d.target.expect(i, "r", d.now))), IDS),
    st.builds(lambda i, held: local(lambda d: grant(d, i, held)), IDS, SMALL),
    st.builds(lambda i: local(lambda d: d.take("target", d.target.wait(i))), IDS),
    st.builds(lambda i: local(lambda d: d.take("target", d.target.refuse(i, "", d.now))), IDS),
    st.builds(lambda i: local(lambda d: d.take("source", d.source.cancel(i, "", d.now))), IDS),
    st.builds(lambda i: local(lambda d: d.take("target", d.target.cancel(i, "", d.now))), IDS),
    st.builds(lambda f: local(lambda d: d.take("source", d.source.set_first(f, d.now))), FIRSTS),
    st.builds(lambda i: local(lambda d: read(d, i)), IDS),
    st.builds(
        lambda peer, i, span: local(lambda d: data(d, peer, i, span)),
        PEERS,
        IDS,
        st.builds(Span, st.integers(0, 3), st.integers(0, 4), st.integers(0, 4)),
    ),
    st.builds(lambda s: lambda duo: duo.tick(s) and None, st.sampled_from([0.5, 1.0, 4.0])),
)


@settings(max_examples=400)
@given(st.lists(STEPS, max_size=60))
def test_anything_may_come_in_any_order(steps: list[Step]) -> None:
    duo = Duo()
    for step in steps:
        step(duo)
        for (side, _), record in duo.records.items():
            if side == "target" and record.state is HandoffState.LANDED:
                missing = len(record.block_table) - LAYOUT.num_blocks_for(record.num_held_tokens)
                assert record.first is not None
                assert [bits.bit_count() for bits in record.claimed] == [missing] * 2
    for _ in range(30):
        duo.tick(0.5)
    assert not duo.source.ledger.live, "left alone, a source ends everything"
    assert not duo.target.ledger.live, "left alone, a target ends everything"
    duo.tick(TOMBSTONE_S)
    assert not duo.source.ledger.tombstones
    assert not duo.target.ledger.tombstones
