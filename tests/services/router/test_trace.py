"""Spans of a request: in order, inside one another, with a lane a layer and no text."""

import json

import pytest

from protos import worker_pb2 as wire
from services.router.timeline import MAX_TOKEN_TIMES, Marks
from services.router.trace import Origin, chrome, origin_of
from services.router.traces import Traces

DONE = wire.PrefillDone(
    prefill_s=0.2,
    handoff_s=0.1,
    handoff_hidden_ratio=0.8,
    handoff_bytes=4096,
    sends=wire.LayerSends(
        layer=[0, 1, 0, 1],
        written_s=[0.05, 0.06, 0.15, 0.16],
        begin_s=[0.07, 0.07, 0.17, 0.17],
        end_s=[0.08, 0.08, 0.21, 0.21],
    ),
    chunks=wire.Chunks(num_tokens=[64, 100], end_s=[0.1, 0.2]),
)


def handed_off() -> Marks:
    marks = Marks(
        received_s=100.0,
        dispatched_s=100.01,
        prefill_instance="prefill-a",
        decode_instance="decode-b",
        prefill_started=wire.PrefillStarted(queue_s=0.04, grant_s=0.01),
        prefill_done=DONE,
        decode_finished=wire.DecodeFinished(),
        finished_s=101.0,
        num_attempts=1,
    )
    for at_s in (100.26, 100.5, 101.0):
        marks.note_tokens(at_s, 1)
    return marks


def remembered(capacity: int = 4, **more: object) -> Traces:
    traces = Traces("m", capacity, wall_clock=lambda: 1001.0, **more)  # type: ignore[arg-type]
    traces.end("r1", 100, handed_off(), Origin(), "stop", 1.0)
    return traces


def test_spans_lie_where_the_marks_say() -> None:
    trace = remembered().find("r1")
    assert trace is not None and trace.received_unix_s == 1000.0
    spans = {span.name: span for span in trace.spans}
    assert [(s.name, s.process) for s in trace.spans] == [
        ("request", "router"),
        ("queue", "router"),
        ("prefill", "prefill-a"),
        ("handoff", "prefill-a"),
        ("decode", "decode-b"),
    ]
    for span in trace.spans:
        assert 0 <= span.start_s <= span.end_s <= 1.0
    assert spans["prefill"].start_s == pytest.approx(0.05)
    assert [e.at_s for e in spans["prefill"].events] == pytest.approx([0.15, 0.25])
    assert spans["handoff"].start_s == pytest.approx(0.12)
    assert spans["handoff"].end_s == pytest.approx(0.26)
    assert [e.at_s for e in spans["decode"].events] == pytest.approx([0.26, 0.5, 1.0])
    assert [layer.attributes["layer"] for layer in trace.layers] == [0, 1, 0, 1]
    assert trace.layers[2].attributes["lag_s"] == pytest.approx(0.06)


def test_chrome_has_a_lane_for_each_layer_and_never_text() -> None:
    trace = remembered().find("r1")
    assert trace is not None
    drawn = json.loads(json.dumps(chrome(trace)))
    lanes = {e["args"]["name"] for e in drawn["traceEvents"] if e["name"] == "thread_name"}
    assert {"layer 000", "layer 001", "prefill", "handoff", "decode", "queue"} <= lanes
    bars = [e for e in drawn["traceEvents"] if e["ph"] == "X"]
    assert len(bars) == 5 + 4
    by_lane: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for bar in bars:
        by_lane.setdefault((bar["pid"], bar["tid"]), []).append((bar["ts"], bar["dur"]))
    for spans in by_lane.values():
        ends = [ts + dur for ts, dur in sorted(spans)]
        assert all(end <= ts + 1e-6 for end, (ts, _) in zip(ends, sorted(spans)[1:], strict=False))
    assert sum(e["ph"] == "i" for e in drawn["traceEvents"]) == 2 + 3


def test_a_request_that_failed_early_has_what_is_known() -> None:
    traces = Traces("m", 4)
    traces.end("r", 5, Marks(received_s=10.0), Origin(), "unavailable", 0.2)
    trace = traces.find("r")
    assert trace is not None
    assert [(s.name, s.end_s) for s in trace.spans] == [("request", 0.2), ("queue", 0.0)]
    assert chrome(trace)["otherData"]["outcome"] == "unavailable"


def test_the_memory_is_bounded_and_may_be_none() -> None:
    traces = remembered(2)
    for number in range(5):
        traces.end(f"n{number}", 1, Marks(0.0), Origin(), "stop", 1.0)
    assert [traces.find(f"n{n}") is not None for n in range(5)] == [False] * 3 + [True] * 2
    assert not remembered(0).are_wanted and remembered(0).find("r1") is None
    told: list[object] = []
    assert remembered(0, tell=told.append).are_wanted and len(told) == 1
    marks = Marks(0.0)
    for at_s in range(2 * MAX_TOKEN_TIMES):
        marks.note_tokens(float(at_s), 1)
    assert len(marks.token_times_s) == MAX_TOKEN_TIMES


def test_a_context_that_is_too_long_is_none() -> None:
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    assert origin_of("chat", {"traceparent": parent}) == Origin("chat", parent)
    assert origin_of("chat", {"traceparent": parent, "tracestate": "x" * 600}) == Origin("chat")
