"""The words of the engine: what a client asked, and the life of a sequence. Only its table acts.

Written by the worker's services, read by the scheduler, the runner and the sampler.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto

from engine.errors import IllegalTransition


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class GuideKind(StrEnum):
    """What a guide's source is written in."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Guide:
    """What an answer must be: a language, not a wish."""

    kind: GuideKind
    source: str = ""
    """The schema, the expression or the grammar (Lark)."""
    choices: tuple[str, ...] = ()
    """CHOICE only."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Keep the ``width`` best beginnings instead of drawing."""

    width: int
    length_penalty: float = 1.0
    """A beam's score is its cumulative logprob / length ** length_penalty."""
    early_stopping: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are chosen and when they end. Already validated at the edge."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int = 0
    """Randomness is a pure function of (seed, position)."""
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    min_p: float = 0.0
    """Tokens less probable than this share of the most probable one's are not drawn."""
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    """Taken once from the logit of every token of the output."""
    frequency_penalty: float = 0.0
    """Taken from it for every time it is there."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens of prompt and output are divided by it, negative multiplied."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit)."""
    min_tokens: int = 0
    """Neither EOS nor a stop ends the answer before so many tokens."""
    include_stop: bool = False
    """The stop string or token is part of the answer."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that are never written."""
    logprobs: int | None = None
    """How many alternatives are told with a token's logprob; None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, told once."""
    n: int = 1
    best_of: int = 1
    """At least n."""
    beam_search: BeamSearch | None = None
    guide: Guide | None = None

    @property
    def num_candidates(self) -> int:
        """Answers that are written, of which the ``n`` best are told."""
        width = self.beam_search.width if self.beam_search is not None else 1
        return max(1, self.n, self.best_of, width)

    @property
    def is_ranked(self) -> bool:
        """More answers are written than told: nothing can be told before all have ended."""
        return self.beam_search is not None or self.num_candidates > self.n

    @property
    def num_top_logprobs(self) -> int | None:
        """As ``logprobs``, but to be ranked an answer needs those of its own tokens at least."""
        wanted = self.is_ranked and self.beam_search is None
        return 0 if self.logprobs is None and wanted else self.logprobs


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked, parsed. ``request_id`` is ours and unique in the cluster."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Lower goes first."""
    salt: str = ""
    """Separates prefix caches of different users."""
    output_token_ids: tuple[int, ...] = ()
    """Output of an earlier attempt: read like the prompt, but part of the answer."""

    @property
    def tells_prompt(self) -> bool:
        """Logprobs of the prompt are wanted, and no earlier attempt has told them."""
        return self.sampling.prompt_logprobs is not None and not self.output_token_ids

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """Everything whose KV is computed before the first new token: prompt and earlier output."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_known_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


def fork_seed(seed: int, index: int) -> int:
    """The seed of the ``index``-th answer to one prompt; that of the first is ``seed`` itself.

    A pure function, so that an answer is the same wherever it is written. Uint64: the odd
    multiplier makes equal seeds of different answers as unlikely as of different requests.
    """
    return (seed + index * 0x9E3779B97F4A7C15) % 2**64


def forks_of(request: Request) -> tuple[Request, ...]:
    """The requests that answer ``request``: itself, and one for every other candidate.

    The others' ids end in ``/1``, ``/2`` and so on. Beams are none: no client hears of one before
    the search ends.
    """
    sampling = replace(
        request.sampling,
        n=1,
        best_of=1,
        logprobs=request.sampling.num_top_logprobs,
        prompt_logprobs=None,
    )
    searches = request.sampling.beam_search is not None
    num_forks = 0 if searches else request.sampling.num_candidates - 1
    return (
        request,
        *(
            replace(
                request,
                request_id=f"{request.request_id}/{index}",
                sampling=replace(sampling, seed=fork_seed(sampling.seed, index)),
            )
            for index in range(1, num_forks + 1)
        ),
    )


class Purpose(Enum):
    """What this engine does with a sequence."""

    LOCAL = auto()  # prefill and decode here
    SOURCE = auto()  # prefill here, first token, then hold the KV until it has landed elsewhere
    TARGET = auto()  # the prompt's KV arrives by handoff, decode here


class SequenceState(Enum):
    """The life of a sequence in one engine."""

    WAITING = auto()
    PREFILLING = auto()
    PENDING_DECODE = auto()
    DECODING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class SequenceEvent(Enum):
    """What may happen to a sequence."""

    PICK = auto()  # blocks allocated, prefill may start (a SOURCE still needs its grant)
    RESERVE = auto()  # TARGET: blocks allocated, KV will arrive
    PROMPT_COMPUTED = auto()  # SOURCE: first token sampled, KV held for the handoff
    JOIN = auto()  # decode starts: prompt computed here, or landed
    PREEMPT = auto()  # blocks taken away
    REQUEUE = auto()
    FINISH = auto()


_S, _E = SequenceState, SequenceEvent
SEQUENCE_TABLE: Mapping[SequenceState, Mapping[SequenceEvent, SequenceState]] = {
    _S.WAITING: {
        _E.PICK: _S.PREFILLING,
        _E.RESERVE: _S.PENDING_DECODE,
        _E.FINISH: _S.FINISHED,
    },
    _S.PREFILLING: {
        _E.PROMPT_COMPUTED: _S.PENDING_DECODE,
        _E.JOIN: _S.DECODING,
        _E.PREEMPT: _S.PREEMPTED,
        _E.FINISH: _S.FINISHED,
    },
    _S.PENDING_DECODE: {_E.JOIN: _S.DECODING, _E.FINISH: _S.FINISHED},
    _S.DECODING: {_E.PREEMPT: _S.PREEMPTED, _E.FINISH: _S.FINISHED},
    _S.PREEMPTED: {_E.REQUEUE: _S.WAITING, _E.FINISH: _S.FINISHED},
    _S.FINISHED: {},
}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable the model thought a token, and which ones it thought most probable."""

    token_id: int
    logprob: float
    """Natural logarithm."""
    rank: int
    """1: none was more probable."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), the most probable first; as many as were asked for."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Token ids and progress of one request inside one engine; owned by the scheduler."""

    request: Request
    purpose: Purpose
    arrival_s: float
    state: SequenceState = SequenceState.WAITING
    granted: bool = True
    """SOURCE only: False until the target granted its blocks; nothing is computed before."""
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose KV is in this engine's cache."""
    num_cached_tokens: int = 0
    """Of those, how many came from the prefix cache when it was picked or reserved."""
    num_preemptions: int = 0
    num_unborn_forks: int = 0
    """Sequences that will begin where this one's prompt ends; beams that do not run now."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens after those computed, until the first output token takes them along."""

    @property
    def num_slots(self) -> int:
        """What it takes of the sequences that may decode at once."""
        return 0 if self.purpose is Purpose.SOURCE else 1 + self.num_unborn_forks

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output."""
        return self.request.prompt_token_ids + tuple(self.output_token_ids)

    def advance(self, event: SequenceEvent) -> None:
        """Move by the table.

        Raises:
            IllegalTransition: the table does not allow ``event`` in this state.
        """
        after = SEQUENCE_TABLE[self.state].get(event)
        if after is None:
            where = f"{event.name} in {self.state.name}"
            raise IllegalTransition(f"sequence {self.request_id}: {where}")
        self.state = after
