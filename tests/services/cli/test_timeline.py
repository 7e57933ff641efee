"""The drawing says what the figures say."""

import io

from rich.console import Console

from protos.inference_pb2 import Timeline, Usage
from services.cli.timeline import FULL, HAIR, LIGHT, WIDTH, bar, draw, duration, spans

HANDED_OFF = Timeline(
    queue_s=0.1,
    prefill_s=0.3,
    handoff_s=0.2,
    handoff_hidden_ratio=0.75,
    handoff_bytes=3_100_000,
    first_decode_s=0.02,
    tpot_s=0.0125,
    prefill_instance="prefill-a",
    decode_instance="decode-b",
)
USAGE = Usage(prompt_tokens=1500, output_tokens=1000, cached_tokens=1024)


def drawn(timeline: Timeline, usage: Usage) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(draw(timeline, usage))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_hid_lies_inside_prefill() -> None:
    handoff = next(span for span in spans(HANDED_OFF, USAGE) if span.name == "handoff")
    assert handoff.start_s + handoff.hidden_s == HANDED_OFF.queue_s + HANDED_OFF.prefill_s


def test_a_bar_is_as_long_as_its_time() -> None:
    handoff = next(span for span in spans(HANDED_OFF, USAGE) if span.name == "handoff")
    assert bar(handoff, scale=100) == " " * 25 + LIGHT * 15 + FULL * 5


def test_a_short_time_is_still_seen() -> None:
    queue = spans(HANDED_OFF, USAGE)[0]
    assert bar(queue, scale=1) == HAIR


def test_handed_off() -> None:
    text = drawn(HANDED_OFF, USAGE)
    for words in (
        "prefill-a → decode-b",
        "1500 tokens, 1024 cached",
        "3.1 MB, 75% hidden",
        "80 tokens/s, 1000 tokens",
    ):
        assert words in text
    assert "…" not in text, "cut on a terminal of 80 columns"
    assert max(line.count(FULL) + line.count(LIGHT) for line in text.splitlines()) <= WIDTH


def test_not_handed_off() -> None:
    timeline = Timeline(prefill_s=0.1, decode_instance="decode-b")
    text = drawn(timeline, Usage(prompt_tokens=4, output_tokens=1))
    assert "all at decode-b" in text
    assert "handoff" not in text
    assert "per token" not in text


def test_nothing_took_any_time() -> None:
    assert "prefill" in drawn(Timeline(), Usage())


def test_durations() -> None:
    assert [duration(s) for s in (0.0173, 0.31, 2.414)] == ["17.3 ms", "310 ms", "2.41 s"]
