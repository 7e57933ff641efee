"""The two machines with a clock in hand: leases, halves, repeats, tombstones, refusals."""

from collections import Counter

import pytest

from kvtransfer.errors import IllegalTransition, KvTransferError
from kvtransfer.handoff import frames, ledger
from kvtransfer.handoff.frames import (
    LEASE_S,
    RENEW_S,
    TOMBSTONE_S,
    Cancel,
    Cancelled,
    First,
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
from tests.kvtransfer.duo import ID, LAYOUT, OTHER, TOKENS, Duo, S

P = HandoffState


def test_the_good_way() -> None:
    duo = Duo()
    duo.granted()
    assert duo.state("source") is P.GRANTED
    assert duo.state("target") is P.RESERVED
    duo.send()
    assert duo.state("target") is P.RECEIVING
    first, sent = duo.finish()
    assert first == First(ID, TOKENS, 3)
    assert sent == Sent(ID, 2, 3 * LAYOUT.block_bytes, first)
    assert duo.to_target(first, sent) == [Landed(ID)]
    assert duo.to_source(Landed(ID)) == []
    assert (duo.state("source"), duo.state("target")) == (P.RELEASED, P.LANDED)
    assert duo.refused == Counter()


def test_layers_go_first_to_last_and_the_partial_block_at_the_end() -> None:
    duo = Duo()
    duo.granted()
    spans = []
    for readable in ([3, 0], [8, 5], [8, 8], [9, 8], [9, 9]):
        while (span := duo.source.next_read(ID, readable, 8)) is not None:
            spans.append((span.layer, span.first_block, span.num_blocks))
    assert spans == [(0, 0, 2), (1, 0, 1), (1, 1, 1), (0, 2, 1), (1, 2, 1)]


def test_no_timer_is_longer_than_ten_seconds() -> None:
    assert max(frames.LEASE_S, frames.HALF_S, frames.STALL_S, frames.RENEW_S) <= 10


def test_an_offer_nobody_expects_is_refused() -> None:
    duo = Duo()
    said = duo.take("source", duo.source.offer(S, Offer(ID, "r", TOKENS), 0.0))
    duo.to_target(*said)
    _, heard = duo.tick(4.9)
    assert heard == [Renew((ID,))]
    duo.to_source(*heard)
    _, heard = duo.tick(0.2)
    assert isinstance(heard[0], Refuse)
    duo.to_source(*heard)
    assert duo.state("source") is P.FAILED
    assert duo.reason("source") == "no request expects this handoff"
    assert duo.records["source", ID].refused


def test_a_request_without_an_offer_fails() -> None:
    duo = Duo()
    duo.take("target", duo.target.expect(ID, "r", 0.0))
    duo.tick(4.9)
    assert duo.state("target") is P.EXPECTED
    duo.tick(0.1)
    assert duo.state("target") is P.FAILED
    assert duo.reason("target") == "no offer came for 5 s"


def test_a_cancel_that_comes_first_refuses_the_offer_and_the_request() -> None:
    duo = Duo()
    duo.take("target", duo.target.cancel(ID, "client left", 0.0))
    assert duo.to_target(Offer(ID, "r", TOKENS)) == [Cancel(ID, "client left")]
    duo.take("target", duo.target.expect(ID, "r", 0.0))
    assert duo.state("target") is P.CANCELLED
    assert ID not in duo.target.ledger.live
    duo.take("source", duo.source.cancel(ID, "client left", 0.0))
    assert duo.take("source", duo.source.offer(S, Offer(ID, "r", TOKENS), 0.0)) == []
    assert duo.state("source") is P.CANCELLED
    assert duo.reason("source") == "client left"


def test_a_cancel_frame_that_overtakes_the_offer_counts_too() -> None:
    duo = Duo()
    assert duo.to_target(Cancel(ID, "aborted")) == []
    assert duo.to_target(Offer(ID, "r", TOKENS)) == [Cancel(ID, "aborted")]


def test_silence_ends_both_and_renewal_keeps_both() -> None:
    duo = Duo()
    duo.granted()
    for _ in range(20):
        to_target, to_source = duo.tick(RENEW_S)
        assert to_target == to_source == [Renew((ID,))]
        duo.to_target(*to_target)
        duo.to_source(*to_source)
    duo.tick(LEASE_S - 0.1)
    assert duo.state("target") is P.RESERVED
    to_target, to_source = duo.tick(0.1)
    assert duo.state("source") is duo.state("target") is P.FAILED
    assert "silent for 5 s" in duo.reason("source")
    assert "silent for 5 s" in duo.reason("target")
    assert isinstance(to_target[0], Cancel), "the peer is told, should it live"


def test_one_renew_for_all_handoffs_of_a_pair() -> None:
    duo = Duo()
    duo.offered(ID)
    duo.offered(OTHER)
    said, _ = duo.tick(RENEW_S)
    assert [f for f in said if isinstance(f, Renew)] == [Renew((ID, OTHER))]


def test_a_lost_grant_is_repeated_when_the_source_asks_again() -> None:
    duo = Duo()
    duo.offered()
    duo.take("target", duo.target.wait(ID))
    again = [f for f in duo.tick(RENEW_S)[0] if isinstance(f, Offer)]
    assert duo.to_target(*again) == [Wait(ID)]
    duo.take("target", duo.target.grant(ID, (1, 2, 3), 4, duo.now))
    again = [f for f in duo.tick(RENEW_S)[0] if isinstance(f, Offer)]
    assert duo.to_target(*again) == [Grant(ID, 4)]
    duo.to_source(Grant(ID, 4))
    assert duo.state("source") is P.GRANTED
    assert duo.refused == Counter(), "an honest repeat is no offence"


def test_a_lost_landed_is_repeated_until_the_tombstone_is_gone() -> None:
    duo = Duo()
    duo.granted()
    duo.send()
    duo.to_target(*duo.finish())
    assert duo.state("target") is P.LANDED
    (sent,) = (f for f in duo.tick(RENEW_S)[0] if isinstance(f, Sent))
    assert duo.to_target(sent) == [Landed(ID)]
    duo.to_source(Landed(ID))
    assert duo.to_source(Landed(ID)) == []
    assert duo.state("source") is P.RELEASED
    duo.tick(TOMBSTONE_S)
    assert duo.to_target(sent) == []
    assert duo.refused == {"unknown": 1}


def test_bytes_lost_under_way_fail_both() -> None:
    duo = Duo()
    duo.granted()
    duo.send(deliver=False)
    duo.to_target(*duo.finish())
    for _ in range(5):
        to_target, to_source = duo.tick(RENEW_S)
        duo.to_target(*to_target)
        duo.to_source(*to_source)
    assert duo.state("target") is P.FAILED
    assert duo.reason("target") == "bytes are missing and none came for 5 s"
    assert duo.state("source") is P.CANCELLED
    assert duo.reason("source").startswith("cancelled by the target: bytes are missing")


def test_a_lost_cancel_is_said_again_to_whoever_still_believes() -> None:
    duo = Duo()
    duo.granted()
    duo.take("target", duo.target.cancel(ID, "client left", duo.now))
    (renew,) = duo.tick(RENEW_S)[0]
    assert duo.to_target(renew) == [Cancel(ID, "client left")]
    assert Cancelled(ID) in duo.to_source(Cancel(ID, "client left"))
    assert duo.state("source") is P.CANCELLED


def test_frames_of_another_connection_are_foreign() -> None:
    duo = Duo()
    duo.granted()
    for frame in (Offer(ID, "r", TOKENS), Cancel(ID, "!"), First(ID, 1, 1), Renew((ID,))):
        assert duo.to_target(frame, peer="stranger") == []
    for frame in (Grant(ID, 0), Landed(ID), Cancel(ID, "!"), Renew((ID,))):
        assert duo.to_source(frame, peer="stranger") == []
    assert duo.write(Span(0, 0, 1), peer="stranger") == ()
    assert duo.refused == {"foreign": 9}
    assert duo.state("target") is P.RESERVED
    assert duo.state("source") is P.GRANTED


def test_data_is_written_once_and_only_inside_the_grant() -> None:
    duo = Duo()
    duo.offered()
    assert duo.write(Span(0, 0, 1)) == (), "not granted yet"
    duo.take("target", duo.target.grant(ID, (7, 8, 9), 4, duo.now))
    assert duo.write(Span(0, 1, 2)) == (8, 9)
    assert duo.write(Span(0, 1, 2)) == ()
    assert duo.write(Span(0, 2, 1)) == ()
    assert duo.refused == {"unexpected": 1, "duplicate": 2}
    assert duo.records["target", ID].num_bytes == 2 * LAYOUT.region_bytes


@pytest.mark.parametrize(
    "span", [Span(0, 0, 1), Span(0, 2, 2), Span(2, 1, 1), Span(0, 1, 0), Span(0, 3, 1)]
)
def test_a_frame_outside_the_grant_fails_its_handoff_alone(span: Span) -> None:
    duo = Duo()
    duo.granted(held=4)
    duo.offered(OTHER)
    assert duo.write(span) == ()
    assert duo.state("target") is P.FAILED
    assert duo.refused == {"damaged": 1}
    assert OTHER in duo.target.ledger.live


def test_late_and_unknown_data_is_refused() -> None:
    duo = Duo()
    assert duo.write(Span(0, 0, 1)) == ()
    duo.granted()
    duo.take("target", duo.target.cancel(ID, "gone", 0.0))
    assert duo.write(Span(0, 0, 1)) == ()
    assert duo.refused == {"unknown": 1, "late": 1}


def test_a_cancel_waits_for_what_is_in_flight() -> None:
    duo = Duo()
    duo.granted()
    assert duo.source.next_read(ID, [TOKENS] * 2, 1) == Span(0, 0, 1)
    said = duo.take("source", duo.source.cancel(ID, "gone", 0.0))
    assert said == [Cancel(ID, "gone")]
    assert duo.state("source") is P.CANCELLING
    ids, _ = duo.target.begin_write(S, ID, Span(0, 0, 1), 0.0)
    assert ids == (7,)
    duo.to_target(*said)
    assert duo.state("target") is P.CANCELLING
    assert duo.take("source", duo.source.end_read(ID, 0.0)) == [Cancelled(ID)]
    assert duo.take("target", duo.target.end_write(ID, 0.0)) == [Cancelled(ID)]
    assert duo.state("source") is duo.state("target") is P.CANCELLED


def test_a_lost_connection_fails_all_its_handoffs_and_no_others() -> None:
    duo = Duo()
    duo.granted()
    duo.to_target(Offer(OTHER, "r", TOKENS), peer="elsewhere")
    duo.take("target", duo.target.lose_peer(S, "reset", 0.0))
    duo.take("source", duo.source.lose_peer(S, "reset", 0.0))
    assert duo.state("source") is duo.state("target") is P.FAILED
    assert duo.reason("target") == "reset"
    assert list(duo.target.ledger.live) == [OTHER]
    assert duo.to_target(Sent(ID, 0, 0, First(ID, 0, 0))) == [Cancel(ID, "reset")]


@pytest.mark.parametrize("held", [1, 10, 12])
def test_a_grant_that_cannot_be_fails(held: int) -> None:
    duo = Duo()
    duo.offered()
    duo.to_source(Grant(ID, held))
    assert duo.state("source") is P.FAILED


def test_a_wrong_byte_count_fails() -> None:
    duo = Duo()
    duo.granted()
    duo.to_target(Sent(ID, 1, 5, First(ID, 1, 1)))
    assert duo.state("target") is P.FAILED
    assert "sent 5 bytes" in duo.reason("target")


def test_frames_out_of_turn_are_refused() -> None:
    duo = Duo()
    duo.offered()
    duo.to_source(Landed(ID))
    duo.to_target(Sent(ID, 0, 0, First(ID, 1, 1)), Landed(ID))
    duo.to_source(Grant(ID, 0), Grant(ID, 4), Wait(ID), Refuse(ID, "no"))
    assert duo.refused == {"unexpected": 3, "duplicate": 3}
    assert duo.state("source") is P.GRANTED
    assert duo.records["source", ID].num_held_tokens == 0


def test_an_offer_for_another_request_is_refused() -> None:
    duo = Duo()
    duo.take("target", duo.target.expect(ID, "mine", 0.0))
    said = duo.to_target(Offer(ID, "yours", TOKENS))
    assert said == [Refuse(ID, "the offer is for another request")]
    assert duo.state("target") is P.FAILED


def test_a_full_prefix_needs_no_bytes() -> None:
    duo = Duo()
    duo.granted(held=TOKENS)
    assert duo.source.next_read(ID, [TOKENS] * 2, 8) is None
    assert duo.to_target(*duo.finish()) == [Landed(ID)]


def test_what_the_services_must_not_do_raises() -> None:
    duo = Duo()
    with pytest.raises(KvTransferError, match="no offer is here"):
        duo.target.grant(ID, (1, 2, 3), 0, 0.0)
    duo.offered()
    with pytest.raises(KvTransferError, match="3 distinct blocks"):
        duo.target.grant(ID, (1, 2), 0, 0.0)
    with pytest.raises(KvTransferError, match="3 distinct blocks"):
        duo.target.grant(ID, (1, 2, 1), 0, 0.0)
    with pytest.raises(KvTransferError, match="block boundary"):
        duo.target.grant(ID, (1, 2, 3), 3, 0.0)
    with pytest.raises(KvTransferError, match="already"):
        duo.target.expect(ID, "r", 0.0)
    with pytest.raises(KvTransferError, match="already"):
        duo.source.offer(S, Offer(ID, "r", TOKENS), 0.0)
    duo.target.grant(ID, (1, 2, 3), 0, 0.0)
    with pytest.raises(IllegalTransition):
        duo.target.grant(ID, (1, 2, 3), 0, 0.0)


def test_tombstones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_TOMBSTONES", 10)
    duo = Duo()
    for number in range(30):
        duo.target.cancel(bytes([number]) * 16, "", 0.0)
    assert list(duo.target.ledger.tombstones) == [bytes([number]) * 16 for number in range(20, 30)]


def test_an_announced_offer_is_waited_for_however_long_the_queue() -> None:
    duo = Duo()
    duo.source.announce(S, ID)
    duo.take("target", duo.target.expect(ID, "r", 0.0))
    for _ in range(30):
        news, _ = duo.tick(1.0)
        assert news == [Renew((ID,))]
        duo.to_target(*news)
    assert duo.state("target") is P.EXPECTED
    said = duo.take("source", duo.source.offer(S, Offer(ID, "r", TOKENS), duo.now))
    duo.to_target(*said)
    duo.to_source(*duo.take("target", duo.target.grant(ID, (7, 8, 9), 0, duo.now)))
    assert duo.state("source") is P.GRANTED
    news, _ = duo.tick(1.0)
    assert news == [Renew((ID,))], "renewed once, as what it is now"


def test_a_source_that_goes_silent_about_an_announced_offer_ends_the_wait() -> None:
    duo = Duo()
    duo.source.announce(S, ID)
    duo.take("target", duo.target.expect(ID, "r", 0.0))
    news, _ = duo.tick(3.0)
    duo.to_target(*news)
    duo.tick(4.9)
    assert duo.state("target") is P.EXPECTED
    duo.tick(0.2)
    assert duo.state("target") is P.FAILED
    assert duo.reason("target") == "no offer came for 5 s"


def test_an_announced_offer_may_be_called_off_by_either_side() -> None:
    duo = Duo()
    duo.source.announce(S, ID)
    duo.take("target", duo.target.expect(ID, "r", 0.0))
    duo.to_target(*duo.take("source", duo.source.cancel(ID, "client left", 0.0)))
    assert duo.state("target") is P.CANCELLED
    assert duo.tick(1.0)[0] == []

    duo = Duo()
    duo.source.announce(S, ID)
    duo.take("target", duo.target.expect(ID, "r", 0.0))
    duo.take("target", duo.target.cancel(ID, "client left", 0.0))
    news, _ = duo.tick(1.0)
    duo.to_source(*duo.to_target(*news))
    assert duo.tick(1.0)[0] == []
    duo.take("source", duo.source.offer(S, Offer(ID, "r", TOKENS), duo.now))
    assert duo.state("source") is P.CANCELLED


def test_announcements_end_with_their_connection() -> None:
    duo = Duo()
    duo.source.announce(S, ID)
    duo.source.announce("other", OTHER)
    duo.take("source", duo.source.lose_peer(S, "broke", 0.0))
    assert duo.tick(1.0)[0] == [Renew((OTHER,))]
