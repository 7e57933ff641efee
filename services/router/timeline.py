"""Where the time of one request went: marks are noted, everything else is derived here.

Times of the router's own clock are marks; what instances measured arrives as durations, so
clocks need not agree. Knows nothing of streams. Written by ``serving`` and ``dispatch``.
"""

from collections import Counter
from dataclasses import dataclass, field

from protos import inference_pb2 as public
from protos import worker_pb2 as wire
from services.runtime.metrics import RouterMetrics

MAX_TOKEN_TIMES = 1024


@dataclass(slots=True)
class Marks:
    """What is known of one request so far; times in seconds of one monotonic clock."""

    received_s: float
    num_attempts: int = 0
    dispatched_s: float | None = None
    first_token_s: float | None = None
    last_token_s: dict[int, float] = field(default_factory=dict)
    """Of each answer, by index."""
    finished_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    """When tokens came, in seconds since the request did: of the first ``MAX_TOKEN_TIMES``."""
    is_traced: bool = False
    """Instances should report what only traces show."""
    num_output_tokens: int = 0
    """Of all answers together."""
    num_longest_tokens: int = 0
    """Of the answer that has most."""
    prefill_instance: str = ""
    decode_instance: str = ""
    prefill_started: wire.PrefillStarted | None = None
    prefill_done: wire.PrefillDone | None = None
    decode_finished: wire.DecodeFinished | None = None
    came_in_pieces: bool = False
    """Some answer was told token by token, not all at once, as ranked ones are."""
    _num_tokens: Counter[int] = field(default_factory=Counter)

    def begin_attempt(self) -> None:
        """What instances said of an earlier one is void."""
        self.num_attempts += 1
        self.prefill_instance = self.decode_instance = ""
        self.prefill_started = self.prefill_done = self.decode_finished = None

    def note_tokens(self, now_s: float, count: int, index: int = 0) -> float | None:
        """New output tokens of one answer came.

        Returns:
            The gap to those before, None for the answer's first.
        """
        before_s = self.last_token_s.get(index)
        self.last_token_s[index] = now_s
        self.num_output_tokens += count
        if len(self.token_times_s) < MAX_TOKEN_TIMES:
            self.token_times_s.append(now_s - self.received_s)
        self._num_tokens[index] += count
        self.came_in_pieces |= before_s is not None
        self.num_longest_tokens = max(self.num_longest_tokens, self._num_tokens[index])
        if self.first_token_s is None:
            self.first_token_s = now_s
        return None if before_s is None else now_s - before_s


def timeline(marks: Marks) -> public.Timeline:
    """The durations of a request; what nobody reported (yet) is 0.

    A decode instance may finish before its prefill instance has said how its part went: then
    the prefill time is what is left between queue and first token.
    """
    end_s = marks.finished_s if marks.finished_s is not None else marks.received_s
    first_s = marks.first_token_s if marks.first_token_s is not None else end_s
    ttft_s, e2e_s = first_s - marks.received_s, end_s - marks.received_s
    queue_s = _queue_s(marks)
    done, started, finished = marks.prefill_done, marks.prefill_started, marks.decode_finished
    result = public.Timeline(
        attempts=marks.num_attempts,
        queue_s=queue_s,
        prefill_s=_prefill_s(marks, ttft_s - queue_s),
        first_decode_s=finished.first_decode_s if finished else 0.0,
        ttft_s=ttft_s,
        e2e_s=e2e_s,
        prefill_instance=marks.prefill_instance,
        decode_instance=marks.decode_instance,
        grant_s=started.grant_s if started else 0.0,
    )
    if marks.num_longest_tokens > 1 and marks.came_in_pieces:
        result.tpot_s = (e2e_s - ttft_s) / (marks.num_longest_tokens - 1)
    if done:
        result.handoff_s = done.handoff_s
        result.handoff_hidden_ratio = done.handoff_hidden_ratio
        result.handoff_bytes = done.handoff_bytes
    return result


def _queue_s(marks: Marks) -> float:
    """Received by the router -> first computed: our part, then the instance's."""
    if marks.dispatched_s is None:
        return 0.0
    ours_s = marks.dispatched_s - marks.received_s
    if marks.prefill_instance:
        started = marks.prefill_started
        return ours_s + (started.queue_s if started else 0.0)
    return ours_s + (marks.decode_finished.queue_s if marks.decode_finished else 0.0)


def _prefill_s(marks: Marks, rest_s: float) -> float:
    """First computed -> first token sampled, where it was computed."""
    if marks.prefill_done:
        return marks.prefill_done.prefill_s
    if marks.prefill_started:
        return max(0.0, rest_s)
    return marks.decode_finished.prefill_s if marks.decode_finished else 0.0


def observe(
    marks: Marks, metrics: RouterMetrics, ttft_slo_s: float = 0.0, tpot_slo_s: float = 0.0
) -> public.Timeline:
    """The timeline of a request that was answered, after adding it to the histograms.

    Args:
        ttft_slo_s, tpot_slo_s: the objectives; 0: none, which is always met.
    """
    result = timeline(marks)
    metrics.request_queue_time_seconds.observe(result.queue_s)
    metrics.prefill_time_seconds.observe(result.prefill_s)
    metrics.decode_time_seconds.observe(result.e2e_s - result.ttft_s)
    metrics.e2e_request_latency_seconds.observe(result.e2e_s)
    if result.tpot_s:
        metrics.time_per_output_token_seconds.observe(result.tpot_s)
    is_early = not ttft_slo_s or result.ttft_s <= ttft_slo_s
    is_steady = not tpot_slo_s or result.tpot_s <= tpot_slo_s
    if is_early and is_steady:
        metrics.good_requests_total.inc()
    return result
