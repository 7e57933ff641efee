"""What is done to logits before a token is chosen from them.

In this order, each only for the rows that ask for it:

    logit_bias          added
    repetition_penalty  logits of tokens of prompt and output: positive ones divided, negative
                        ones multiplied (Keskar et al. 2019)
    frequency_penalty   taken once for every time a token is in the output
    presence_penalty    taken once if it is there at all
    min_tokens          EOS and stop tokens are out of the question before so many
    bad_words           the token that would complete one is out of the question

All of it is a pure function of (parameters, prompt ids, output ids), so it is the same after a
preemption, a handoff or another attempt. Nothing is kept from step to step: what a token sequence
holds is counted anew, which costs a sort of its ids a step and needs nobody to remember anything.

Knows nothing of plans or steps. Called by ``choice``.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.request import SamplingParams

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
_NEVER = np.float32(-1e30)
"""Finite, so that a sum over a row still tells whether the model's own logits were."""


@dataclass(frozen=True, slots=True)
class History:
    """What a row's next token comes after."""

    sampling: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


def asks(sampling: SamplingParams, num_output_tokens: int) -> bool:
    """Whether ``adjust`` would change this row's logits."""
    return bool(
        sampling.logit_bias
        or sampling.bad_words
        or sampling.repetition_penalty != 1
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or num_output_tokens < sampling.min_tokens
    )


def adjust(logits: Logits, rows: Sequence[History], eos_token_ids: Collection[int]) -> None:
    """Change ``logits`` in place.

    Args:
        logits: ``[rows, vocab_size]``.
        eos_token_ids: end an answer that does not ignore them.
    """
    vocab_size = logits.shape[1]
    _add_bias(logits, rows)
    _repetition(logits, rows, vocab_size)
    _counts(logits, rows, vocab_size)
    for row, history in enumerate(rows):
        banned = [*_early_ends(history, eos_token_ids), *_completing(history)]
        if banned:
            logits[row, banned] = _NEVER


def _add_bias(logits: Logits, rows: Sequence[History]) -> None:
    for row, history in enumerate(rows):
        if bias := history.sampling.logit_bias:
            ids, values = zip(*bias, strict=True)
            logits[row, list(ids)] += np.array(values, np.float32)


def _repetition(logits: Logits, rows: Sequence[History], vocab_size: int) -> None:
    asking = [r for r, h in enumerate(rows) if h.sampling.repetition_penalty != 1]
    if not asking:
        return
    seen = [
        _unique((rows[r].prompt_token_ids, rows[r].output_token_ids), vocab_size) for r in asking
    ]
    index, ids = _pairs(asking, seen)
    penalty = _spread([rows[r].sampling.repetition_penalty for r in asking], seen)
    values = logits[index, ids]
    logits[index, ids] = np.where(values > 0, values / penalty, values * penalty)


def _counts(logits: Logits, rows: Sequence[History], vocab_size: int) -> None:
    asking = [
        r
        for r, h in enumerate(rows)
        if h.output_token_ids and (h.sampling.frequency_penalty or h.sampling.presence_penalty)
    ]
    if not asking:
        return
    outputs = [_array(rows[r].output_token_ids, vocab_size) for r in asking]
    found = [np.unique(each, return_counts=True) for each in outputs]
    seen = [ids for ids, _ in found]
    index, ids = _pairs(asking, seen)
    frequency = _spread([rows[r].sampling.frequency_penalty for r in asking], seen)
    presence = _spread([rows[r].sampling.presence_penalty for r in asking], seen)
    counts = np.concatenate([count for _, count in found]).astype(np.float32)
    logits[index, ids] -= frequency * counts + presence


def _early_ends(history: History, eos_token_ids: Collection[int]) -> Iterable[int]:
    sampling = history.sampling
    if len(history.output_token_ids) >= sampling.min_tokens:
        return ()
    return (*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids))


def _completing(history: History) -> list[int]:
    """The last tokens of those bad words of which all others stand at the end of the output."""
    last = []
    output = history.output_token_ids
    for word in history.sampling.bad_words:
        before = len(word) - 1
        if not before or tuple(output[-before:]) == word[:-1]:
            last.append(word[-1])
    return last


def _array(token_ids: Sequence[int], vocab_size: int) -> Ids:
    ids = np.array(token_ids, np.int64)
    return ids[ids < vocab_size]


def _unique(parts: Iterable[Sequence[int]], vocab_size: int) -> Ids:
    return np.unique(np.concatenate([_array(part, vocab_size) for part in parts]))


def _pairs(rows: Sequence[int], seen: Sequence[Ids]) -> tuple[Ids, Ids]:
    """Row and column of every token that some row has seen."""
    return np.repeat(np.array(rows, np.int64), [len(s) for s in seen]), np.concatenate(seen)


def _spread(values: Sequence[float], seen: Sequence[Ids]) -> Logits:
    return np.repeat(np.array(values, np.float32), [len(s) for s in seen])
