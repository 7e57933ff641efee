"""Durations derived from marks, whole and with parts missing."""

import pytest
from prometheus_client import CollectorRegistry

from protos import worker_pb2 as wire
from services.router.timeline import Marks, observe, timeline
from services.runtime.metrics import RouterMetrics


def _marks(**known: object) -> Marks:
    marks = Marks(received_s=100.0, dispatched_s=100.5)
    assert marks.note_tokens(102.0, 1) is None
    assert marks.note_tokens(102.5, 1) == 0.5
    assert marks.note_tokens(104.0, 2) == 1.5
    marks.finished_s = 105.0
    for name, value in known.items():
        setattr(marks, name, value)
    return marks


STARTED = wire.PrefillStarted(queue_s=0.25, grant_s=0.125)
DONE = wire.PrefillDone(
    prefill_s=1.25, handoff_s=0.5, handoff_hidden_ratio=0.75, handoff_bytes=4096
)


def test_a_handed_off_request() -> None:
    finished = wire.DecodeFinished(first_decode_s=0.5, queue_s=9, prefill_s=9)
    line = timeline(
        _marks(
            prefill_instance="p",
            decode_instance="d",
            prefill_started=STARTED,
            prefill_done=DONE,
            decode_finished=finished,
        )
    )
    assert (line.queue_s, line.prefill_s, line.grant_s) == (0.75, 1.25, 0.125)
    assert (line.ttft_s, line.e2e_s, line.tpot_s) == (2.0, 5.0, 1.0)
    assert (line.handoff_s, line.handoff_hidden_ratio, line.handoff_bytes) == (0.5, 0.75, 4096)
    assert (line.first_decode_s, line.prefill_instance, line.decode_instance) == (0.5, "p", "d")
    assert line.queue_s + line.prefill_s <= line.ttft_s


def test_decode_finished_before_prefill_reported() -> None:
    line = timeline(_marks(prefill_instance="p", prefill_started=STARTED))
    assert (line.queue_s, line.handoff_s) == (0.75, 0.0)
    assert line.queue_s + line.prefill_s == line.ttft_s
    line = timeline(_marks(prefill_instance="p"))
    assert (line.queue_s, line.prefill_s) == (0.5, 0.0)


def test_a_request_that_stayed_on_one_instance() -> None:
    finished = wire.DecodeFinished(queue_s=0.25, prefill_s=1.0)
    line = timeline(_marks(decode_instance="d", decode_finished=finished))
    assert (line.queue_s, line.prefill_s) == (0.75, 1.0)
    assert (line.handoff_s, line.prefill_instance) == (0.0, "")


def test_no_token_or_one() -> None:
    marks = Marks(received_s=100.0, dispatched_s=100.0, finished_s=103.0)
    assert (timeline(marks).ttft_s, timeline(marks).tpot_s) == (3.0, 0.0)
    marks.note_tokens(101.0, 1)
    assert (timeline(marks).ttft_s, timeline(marks).tpot_s) == (1.0, 0.0)
    assert timeline(Marks(received_s=100.0)).e2e_s == 0.0


def test_histograms_hold_what_the_timeline_says() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics.create(registry, "m", "r")
    line = observe(_marks(prefill_instance="p", prefill_done=DONE), metrics)
    labels = {"model": "m", "role": "router", "instance": "r"}
    for name, value in (
        ("kvrelay_request_queue_time_seconds_sum", line.queue_s),
        ("kvrelay_prefill_time_seconds_sum", 1.25),
        ("kvrelay_e2e_request_latency_seconds_sum", 5.0),
    ):
        assert registry.get_sample_value(name, labels) == pytest.approx(value)


def test_answers_that_come_at_once_have_no_time_per_token() -> None:
    marks = Marks(1.0)
    for index in range(2):
        assert marks.note_tokens(3.0, 20, index) is None
    marks.finished_s = 3.5
    assert (timeline(marks).ttft_s, timeline(marks).tpot_s) == (2.0, 0.0)


def test_an_answer_is_good_that_meets_both_objectives() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics.create(registry, "m", "r")
    marks = Marks(received_s=100.0, dispatched_s=100.0, finished_s=103.0)
    for now_s in (101.0, 102.0, 103.0):
        marks.note_tokens(now_s, 1)
    good = []
    for objectives in ((0, 0), (1.0, 1.0), (0.5, 0), (0, 0.5), (2, 2)):
        observe(marks, metrics, *objectives)
        good.append(metrics.good_requests_total._value.get())
    assert good == [1, 2, 2, 2, 3]
