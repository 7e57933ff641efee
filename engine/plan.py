"""What crosses between scheduler and runner: one frozen plan there, one result back.

Knows nothing of tensors. Made by ``scheduler``, read by ``runner``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.beams import Candidates, Hypothesis
from engine.kv.manager import BlockCopy
from engine.request import FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Fork:
    """A sequence that begins where another's prompt ends."""

    request_id: str
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One row group of a step: ``token_ids`` at positions ``start`` and on."""

    request_id: str
    token_ids: tuple[int, ...]
    """Computed in this step; their KV is written. Never empty."""
    start: int
    """Position of ``token_ids[0]``; everything before is in the cache."""
    block_table: tuple[int, ...]
    """Blocks of positions 0 .. start + len(token_ids) - 1, at least."""
    samples: bool
    """Sample the token at position ``end`` from the last row's logits."""
    sampling: SamplingParams
    forks: tuple[Fork, ...] = ()
    """Others that sample from the same logits; told under their own ids."""
    prompt_token_ids: Sequence[int] = ()
    """All of the prompt, and what has been written: not copies. They change between steps only."""
    output_token_ids: Sequence[int] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_prompt_rows(self) -> int:
        """How many of its first rows tell the logprob of the prompt token that comes next.

        None once there is output: then they have been told, here or by an earlier attempt.
        """
        if self.sampling.prompt_logprobs is None or self.output_token_ids:
            return 0
        return max(0, min(self.end, len(self.prompt_token_ids) - 1) - self.start)

    @property
    def samplers(self) -> tuple["ScheduledSequence", ...]:
        """Everybody who samples from the last row: this sequence and its forks, each alone."""
        if not self.samples:
            return ()
        others = (
            replace(self, request_id=fork.request_id, sampling=fork.sampling, forks=())
            for fork in self.forks
        )
        return (self, *others)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward."""

    step: int
    sequences: tuple[ScheduledSequence, ...] = ()
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    copies: tuple[BlockCopy, ...] = ()
    """Made in this order before anything is written."""

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner sampled: request_id -> token id, for every sequence that samples and its
    forks.

    A sequence whose row could not be sampled (its logits are not finite) is in ``failures``
    instead: the other rows of the step stand.
    """

    token_ids: dict[str, int]
    failures: dict[str, str] = field(default_factory=dict)
    """request_id -> one line of reason."""
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    """request_id -> of its token, where they were asked for."""
    cut_short: dict[str, str] = field(default_factory=dict)
    """request_id -> why its answer cannot go on, though nothing is wrong with the engine."""
    candidates: dict[str, Candidates] = field(default_factory=dict)
    """request_id -> of a beam: its most probable next tokens, of which its token is the first."""
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """request_id -> of the prompt tokens after its rows, where they were asked for."""


@dataclass(frozen=True, slots=True)
class Picked:
    """A sequence got its blocks and may start. For a SOURCE: time to OFFER."""

    request_id: str
    num_cached_tokens: int
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """A step ended: KV of this sequence is in the cache below ``num_computed_tokens``.

    Told of a SOURCE, and of a search when its prompt is computed and its beams begin.
    """

    request_id: str
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """A new output token. ``finish_reason`` is set on the last one.

    A stop token (EOS or ``stop_token_ids``) ends the answer and is not part of it:
    then ``token_id`` is that token and ``finish_reason`` is STOP.
    """

    request_id: str
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first output token, where asked for: of every prompt token but the first."""
    candidates: Candidates = ()
    """Of a SOURCE whose target will search: what its first beam may go on with."""


@dataclass(frozen=True, slots=True)
class BeamsEnded:
    """A search is over; its blocks are free."""

    request_id: str
    hypotheses: tuple[Hypothesis, ...]
    """The best answers, the best first."""


@dataclass(frozen=True, slots=True)
class CutShort:
    """An answer ends here with ERROR, without another token; its blocks are free."""

    request_id: str
    reason: str
    """One line."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine gave this sequence up; its blocks are free."""

    request_id: str
    reason: str


EngineEvent = Picked | Computed | Sampled | BeamsEnded | CutShort | Failed
