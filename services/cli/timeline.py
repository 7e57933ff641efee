"""Where the time of one answer went, drawn for people.

    queue         ▏                               2.1 ms
    prefill       ██████████████████████████      310 ms  95 tokens
    handoff         ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒█     290 ms  3.1 MB, 93% hidden
    first decode                            ██   21.0 ms
    per token                                    17.3 ms  58 tokens/s, 40 tokens

The light part of the handoff is hidden: it passed while prefill was still computing. There are
only durations: where the handoff's bar starts is derived from them. Pure functions over a
``Timeline``.
"""

from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from protos.inference_pb2 import Timeline, Usage

WIDTH = 28
FULL, LIGHT, HAIR = "█", "▒", "▏"


@dataclass(frozen=True, slots=True)
class Span:
    """One row: a bar from ``start_s`` on, of which the first ``hidden_s`` are drawn lightly."""

    name: str
    start_s: float
    duration_s: float
    hidden_s: float = 0.0
    note: str = ""


def spans(timeline: Timeline, usage: Usage) -> list[Span]:
    """The rows that have a place on the time axis."""
    prefilled_s = timeline.queue_s + timeline.prefill_s
    prompt = f"{usage.prompt_tokens} tokens"
    if usage.cached_tokens:
        prompt += f", {usage.cached_tokens} cached"
    rows = [
        Span("queue", 0.0, timeline.queue_s),
        Span("prefill", timeline.queue_s, timeline.prefill_s, note=prompt),
    ]
    if timeline.prefill_instance:
        hidden_s = timeline.handoff_s * timeline.handoff_hidden_ratio
        megabytes = timeline.handoff_bytes / 1e6
        note = f"{megabytes:.1f} MB, {timeline.handoff_hidden_ratio:.0%} hidden"
        start_s = max(0.0, prefilled_s - hidden_s)
        rows.append(Span("handoff", start_s, timeline.handoff_s, hidden_s, note))
    if usage.output_tokens > 1:
        rows.append(Span("first decode", prefilled_s, timeline.first_decode_s))
    return rows


def bar(span: Span, scale: float) -> str:
    """``scale``: columns per second. What takes no column still shows as a hair."""
    indent = " " * min(WIDTH - 1, round(span.start_s * scale))
    length = round(span.duration_s * scale)
    light = round(span.hidden_s * scale)
    return indent + (LIGHT * light + FULL * (length - light) or HAIR)


def duration(seconds: float) -> str:
    """``17.3 ms``, ``310 ms``, ``2.41 s``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"


def draw(timeline: Timeline, usage: Usage) -> Table:
    """The drawing, for a rich console."""
    rows = spans(timeline, usage)
    end_s = max(span.start_s + span.duration_s for span in rows)
    scale = WIDTH / end_s if end_s > 0 else 0.0
    route = f"{timeline.prefill_instance} → {timeline.decode_instance}"
    table = Table.grid(padding=(0, 2))
    table.title = route if timeline.prefill_instance else f"all at {timeline.decode_instance}"
    table.title_justify = "left"
    for justify in ("left", "left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for span in rows:
        table.add_row(span.name, Text(bar(span, scale)), duration(span.duration_s), span.note)
    if timeline.tpot_s > 0:
        note = f"{1 / timeline.tpot_s:.0f} tokens/s, {usage.output_tokens} tokens"
        table.add_row("per token", "", duration(timeline.tpot_s), note)
    table.add_row("first token", "", duration(timeline.ttft_s), "since the request")
    table.add_row("whole answer", "", duration(timeline.e2e_s), "")
    if timeline.prefill_instance:
        table.caption = f"{LIGHT} hidden: on the wire while prefill was still computing"
        table.caption_justify = "left"
    return table
