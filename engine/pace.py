"""How long a prefill chunk may be so that a step keeps its time bound. Pure; times are passed in.

Knows nothing of what a step computes. Asked by the engine loop before every plan.
"""

from engine.config import EngineConfig


class Pace:
    """Learns seconds per prefill token from finished steps, and answers with a chunk limit.

    The newest steps weigh most (exponential moving average): attention makes a token dearer
    as the context grows, and other processes come and go.
    """

    def __init__(self, config: EngineConfig, first_guess_tokens: int = 128) -> None:
        self._max_step_s = config.max_step_s
        self._max_gap_s = min(config.max_gap_s, config.max_step_s)
        self._most_tokens = config.token_budget
        self._token_s = config.max_step_s / first_guess_tokens

    def limit_tokens(self, beside_decodes: bool = False) -> int:
        """Prefill tokens that are predicted to take ``max_step_s``; at least 1.

        Args:
            beside_decodes: the step carries decodes, too: ``max_gap_s`` is the bound.
        """
        bound_s = self._max_gap_s if beside_decodes else self._max_step_s
        return max(1, min(self._most_tokens, int(bound_s / self._token_s)))

    def observe(self, num_prefill_tokens: int, num_decode_tokens: int, elapsed_s: float) -> None:
        """Learn from one step. Steps without a chunk say nothing about chunks."""
        if num_prefill_tokens == 0:
            return
        share = num_prefill_tokens / (num_prefill_tokens + num_decode_tokens)
        seen = elapsed_s * share / num_prefill_tokens
        # A short chunk is mostly fixed cost: it may only say that tokens are cheap.
        if num_prefill_tokens * 2 < self.limit_tokens(num_decode_tokens > 0) and (
            seen > self._token_s
        ):
            return
        self._token_s += 0.3 * (seen - self._token_s)
