"""Busy time is a union of intervals; the hidden part is what lies before a moment."""

from kvtransfer.stats import BusyTime, HandoffStats


def test_overlapping_intervals_count_once() -> None:
    busy = BusyTime()
    for begin, end in ((1.0, 2.0), (1.5, 3.0), (5.0, 6.0), (5.2, 5.4)):
        busy.add(begin, end)
    assert busy.total_s() == 3.0
    assert [busy.before_s(moment) for moment in (0, 2, 4, 5.5, 9)] == [0, 1, 2, 2.5, 3]


def test_hidden_ratio() -> None:
    stats = HandoffStats(1, 1, 0, grant_s=0.0, transfer_s=4.0, hidden_s=3.0)
    assert stats.hidden_ratio == 0.75
    nothing = HandoffStats(0, 0, 16, grant_s=0.0, transfer_s=0.0, hidden_s=0.0)
    assert nothing.hidden_ratio == 1.0
