"""Beam search: of all beginnings of an answer, the best few are continued. Pure.

At every step each running beam brings its most probable next tokens. Of all these children, by
cumulative logprob, the best ``width`` that do not end the answer run on; those that end it are
finished if they are among the best ``width`` of all, and the best ``width`` finished ones, by
score, are kept. It is over when all are finished and, unless ``early_stopping`` says that this is
enough, none that runs has a better score now; or when nothing can run on. That is the search of
transformers, so that both give the same answers.

Knows beams by number: 0 is the sequence that read the prompt, and always runs. Knows nothing of
blocks or steps. Owned by the sequences of one search, advanced by ``beam_steps``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.request import BeamSearch, FinishReason, Request

Candidates = Sequence[tuple[int, float]]
"""(token id, logprob), the most probable first."""
Ends = Callable[[int, int], FinishReason | None]
"""How an answer ends with this token as its n-th, if it does."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One finished answer, the token that ended it included."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    cumulative_logprob: float
    score: float
    """What it is ranked by: cumulative logprob / length ** length_penalty."""


@dataclass(frozen=True, slots=True)
class Child:
    """One token on from a running beam."""

    parent: int
    token_id: int
    cumulative_logprob: float


def num_candidates(search: BeamSearch, num_end_tokens: int) -> int:
    """So many of a beam's next tokens are enough: the best ``width`` that do not end it are there.

    Args:
        num_end_tokens: tokens that end an answer.
    """
    return max(2 * search.width, search.width + num_end_tokens)


class Beams:
    """One search: what runs and what has finished."""

    def __init__(self, request: Request) -> None:
        search = request.sampling.beam_search
        assert search is not None
        self.request = request
        self._search = search
        self._running: dict[int, float] = {0: 0.0}
        self._finished: list[Hypothesis] = []

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of the sequences of the running beams; that of the first is the request's own."""
        return tuple(map(self.request_id, self._running))

    @property
    def finished(self) -> tuple[Hypothesis, ...]:
        """The best so far, the best first."""
        return tuple(self._finished)

    def request_id(self, number: int) -> str:
        return f"{self.request.request_id}/{number}" if number else self.request.request_id

    def restart(self) -> None:
        """Nothing has been said of the search yet: after a preemption it begins anew."""
        self._running = {0: 0.0}
        self._finished = []

    def advance(
        self, candidates: Mapping[str, Candidates], outputs: Mapping[str, Sequence[int]], ends: Ends
    ) -> dict[int, Child]:
        """One step on.

        Args:
            candidates: request_id -> next tokens of each running beam.
            outputs: request_id -> what it has written.

        Returns:
            The beams that run now, by number; none: the search is over.
        """
        width = self._search.width
        found = [
            Child(number, token_id, so_far + logprob)
            for number, so_far in self._running.items()
            for token_id, logprob in candidates[self.request_id(number)]
        ]
        found.sort(key=lambda child: -child.cumulative_logprob)
        children: list[Child] = []
        for place, child in enumerate(found):
            output = outputs[self.request_id(child.parent)]
            reason = ends(child.token_id, len(output) + 1)
            if reason is None:
                children.append(child)
            elif place < width:
                self._finish(child, output, reason)
        children = children[:width]
        if children and self._is_over(children[0], len(outputs[self.request.request_id]) + 1):
            children = []
        seated = _seats(children)
        self._running = {number: child.cumulative_logprob for number, child in seated.items()}
        return seated

    def _finish(self, child: Child, output: Sequence[int], reason: FinishReason) -> None:
        token_ids = (*output, child.token_id)
        score = self._score(child, len(token_ids))
        self._finished.append(Hypothesis(token_ids, reason, child.cumulative_logprob, score))
        self._finished.sort(key=lambda each: -each.score)
        del self._finished[self._search.width :]

    def _is_over(self, best: Child, num_tokens: int) -> bool:
        if len(self._finished) < self._search.width:
            return False
        worst = self._finished[-1].score
        return self._search.early_stopping or self._score(best, num_tokens) <= worst

    def _score(self, child: Child, num_tokens: int) -> float:
        return child.cumulative_logprob / math.pow(num_tokens, self._search.length_penalty)


def _seats(children: Sequence[Child]) -> dict[int, Child]:
    """A number for each child: a parent's best one goes on in its place, and one is the first."""
    seats: dict[int, Child] = {}
    standing = []
    for child in children:
        if child.parent in seats:
            standing.append(child)
        else:
            seats[child.parent] = child
    if children and 0 not in seats:
        # Another's place is given up for it when there is nobody without one.
        standing = standing or [seats.pop(next(reversed(seats)))]
    free = (number for number in range(len(children)) if number not in seats)
    return seats | dict(zip(free, standing, strict=False))
