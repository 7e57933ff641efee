"""Answers of which only the best are told: kept until all have ended, then ranked.

Knows what an answer says, not how it comes about. Used by ``choices``.
"""

from engine.plan import Sampled
from protos import inference_pb2 as public
from protos import worker_pb2 as wire


class Kept:
    """One answer, as far as it has come."""

    def __init__(self) -> None:
        self.tokens = public.Tokens()
        self.cumulative_logprob = 0.0
        self.finished: wire.DecodeFinished | None = None
        self._num_tokens = 0

    @property
    def mean_logprob(self) -> float:
        """What OpenAI ranks by. The token that ended the answer counts, too."""
        return self.cumulative_logprob / max(1, self._num_tokens)

    def count(self, sampled: Sampled) -> None:
        """One more token was chosen, and how probable it was is known."""
        assert sampled.logprobs is not None
        # As precise as it travels, so that a handed-off first token counts the same.
        self.cumulative_logprob += public.TokenLogprob(logprob=sampled.logprobs.logprob).logprob
        self._num_tokens += 1

    def take(self, tokens: public.Tokens) -> None:
        """What follows is told."""
        text = self.tokens.text + tokens.text
        self.tokens.MergeFrom(tokens)
        self.tokens.text = text
