"""What a finished request teaches about how fast instances are. Called by ``attempts``.

Knows which marks say what; how observations become predictions is in ``rates``.
"""

from services.router.rates import Rates
from services.router.timeline import Marks


def learn(
    rates: Rates, marks: Marks, num_prompt_tokens: int, num_beside: int, prefill_s: float | None
) -> None:
    """Take in one answered request.

    Args:
        num_prompt_tokens: what its last attempt had to read.
        num_beside: other requests on its decode instance while it was written, about.
        prefill_s: how long an instance was at its prompt, without those before it. What the
            instance reports is from its grant on, and a queue is granted ahead.
    """
    done, finished = marks.prefill_done, marks.decode_finished
    if done is not None:
        alone_s = done.prefill_s if prefill_s is None else min(prefill_s, done.prefill_s)
        rates.saw_prefill(done.computed_tokens, done.cached_tokens, alone_s)
        exposed_s = done.handoff_s * (1 - done.handoff_hidden_ratio)
        num_sent = num_prompt_tokens - done.skipped_tokens
        rates.saw_handoff(marks.prefill_instance, marks.decode_instance, num_sent, exposed_s)
    elif finished is not None and not marks.prefill_instance and not num_beside:
        # Beside others a prompt is computed in chunks, which says more of them than of it.
        num_computed = num_prompt_tokens - finished.cached_tokens
        rates.saw_prefill(num_computed, finished.cached_tokens, finished.prefill_s)
    count = marks.num_longest_tokens
    if count and marks.first_token_s is not None and marks.finished_s is not None:
        tpot_s = (marks.finished_s - marks.first_token_s) / (count - 1) if count > 1 else 0.0
        rates.saw_decode(num_beside + 1, count, tpot_s)
