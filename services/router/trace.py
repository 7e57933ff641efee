"""One request as spans on lanes, made of its marks when somebody asks. Pure.

    router    request  ████████████████████████████████████
              queue    ▏
    prefill   prefill   ██████████                           an event for each chunk
              handoff      ████████
              layer 0      ██   ███                          what left when, layer by layer
    decode    decode             ██████████████████████████  an event for each step's tokens

Times are seconds since the request came: the router's own are marks, those of instances begin
where the router's say that they began, so the clocks of machines need not agree. There is no text
in it, neither of prompts nor of answers. Made by ``traces``; ``chrome`` is what browsers draw.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.router.timeline import Marks, timeline

Attributes = Mapping[str, str | int | float]
ROUTER = "router"
MICROSECONDS = 1e6
MAX_PARENT_CHARACTERS, MAX_STATE_CHARACTERS = 128, 512


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from."""

    operation: str = "text_completion"
    """As OpenTelemetry's conventions for GenAI name it; or chat."""
    traceparent: str = ""
    """The client's W3C context, as it was sent."""
    tracestate: str = ""


def origin_of(operation: str, headers: Mapping[str, str]) -> Origin:
    """From headers or metadata, with lower-case names. What is too long to be W3C's is no context:
    whether it is one is seen where spans are made."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if len(parent) > MAX_PARENT_CHARACTERS or len(state) > MAX_STATE_CHARACTERS:
        return Origin(operation)
    return Origin(operation, parent, state)


@dataclass(frozen=True, slots=True)
class Event:
    """One moment of a span."""

    name: str
    at_s: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Args:
        process: the router, or an instance's id.
        lane: spans of one lane do not overlap; empty: the process's first.
    """

    name: str
    process: str
    start_s: float
    end_s: float
    lane: str = ""
    attributes: Attributes = field(default_factory=dict)
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """One request that has ended. The first span is the whole of it, the rest is inside."""

    request_id: str
    model: str
    origin: Origin
    outcome: str
    """Finish reason, or the label of its error."""
    received_unix_s: float
    spans: tuple[Span, ...]
    layers: tuple[Span, ...] = ()
    """What left of each layer, and when; inside the handoff."""


def spans_of(marks: Marks, end_s: float, num_prompt_tokens: int) -> tuple[Span, ...]:
    """The spans of a request that ended ``end_s`` after it came."""
    line = timeline(marks)
    read_by = line.prefill_instance or line.decode_instance
    # Of what was never reported, nothing is drawn.
    prefill_s = min(line.queue_s + line.prefill_s, end_s)
    first_s = _since(marks, marks.first_token_s)
    usage = {"prompt_tokens": num_prompt_tokens, "output_tokens": marks.num_output_tokens}
    spans = [
        Span("request", ROUTER, 0.0, end_s, attributes={**usage, "attempts": line.attempts}),
        Span("queue", ROUTER, 0.0, min(line.queue_s, end_s), "queue"),
    ]
    if line.prefill_s:
        chunks = _chunks(marks, line.queue_s)
        spans.append(Span("prefill", read_by, line.queue_s, prefill_s, events=chunks))
    if line.handoff_s:
        spans.append(_handoff(marks, line.queue_s, prefill_s))
    if first_s is not None:
        steps = tuple(Event("tokens", at_s) for at_s in marks.token_times_s)
        spans.append(Span("decode", line.decode_instance, first_s, end_s, events=steps))
    return tuple(spans)


def layers_of(marks: Marks) -> tuple[Span, ...]:
    """A span for each part of a layer that was sent."""
    done = marks.prefill_done
    if done is None:
        return ()
    begin_s, sends = timeline(marks).queue_s, done.sends
    moments = zip(sends.layer, sends.written_s, sends.begin_s, sends.end_s, strict=True)
    return tuple(
        Span(
            f"layer {layer}",
            marks.prefill_instance,
            begin_s + sent_from_s,
            begin_s + sent_s,
            f"layer {layer:03d}",
            {"layer": layer, "lag_s": max(0.0, sent_s - written_s)},
        )
        for layer, written_s, sent_from_s, sent_s in moments
    )


def chrome(trace: Trace) -> dict[str, Any]:
    """The trace in Chrome's format, which Perfetto and chrome://tracing open."""
    every = (*trace.spans, *trace.layers)
    processes = list(dict.fromkeys(span.process for span in every))
    lanes = list(dict.fromkeys((span.process, _lane(span)) for span in every))
    events: list[dict[str, Any]] = []
    for number, name in enumerate(processes, 1):
        events.append(_meta("process_name", number, 0, name))
    for number, (process, lane) in enumerate(lanes, 1):
        events.append(_meta("thread_name", processes.index(process) + 1, number, lane))
    for span in every:
        where = {
            "pid": processes.index(span.process) + 1,
            "tid": lanes.index((span.process, _lane(span))) + 1,
        }
        begin = {"name": span.name, "ph": "X", "ts": span.start_s * MICROSECONDS}
        length_s = max(0.0, span.end_s - span.start_s)
        said = {"dur": length_s * MICROSECONDS, "args": dict(span.attributes)}
        events.append({**begin, **said, **where})
        for moment in span.events:
            at = {"name": moment.name, "ph": "i", "s": "t", "ts": moment.at_s * MICROSECONDS}
            events.append({**at, "args": dict(moment.attributes), **where})
    about = {"request_id": trace.request_id, "model": trace.model, "outcome": trace.outcome}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _lane(span: Span) -> str:
    return span.lane or span.name


def _meta(name: str, process: int, lane: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": lane, "args": {"name": value}}


def _since(marks: Marks, moment_s: float | None) -> float | None:
    return None if moment_s is None else moment_s - marks.received_s


def _chunks(marks: Marks, begin_s: float) -> tuple[Event, ...]:
    if marks.prefill_done is None:
        return ()
    chunks = marks.prefill_done.chunks
    return tuple(
        Event("chunk", begin_s + end_s, {"num_computed_tokens": num_tokens})
        for num_tokens, end_s in zip(chunks.num_tokens, chunks.end_s, strict=True)
    )


def _handoff(marks: Marks, begin_s: float, prefill_s: float) -> Span:
    """From the first byte that left to the last; without its sends, around the end of prefill."""
    line, layers = timeline(marks), layers_of(marks)
    start_s = max(begin_s, prefill_s - line.handoff_s * line.handoff_hidden_ratio)
    end_s = start_s + line.handoff_s
    if layers:
        start_s = min(each.start_s for each in layers)
        end_s = max(each.end_s for each in layers)
    said: Attributes = {
        "handoff_bytes": line.handoff_bytes,
        "handoff_hidden_ratio": line.handoff_hidden_ratio,
        "grant_s": line.grant_s,
    }
    return Span("handoff", line.prefill_instance, start_s, end_s, attributes=said)
