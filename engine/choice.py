"""From the logits of a step to its tokens: adjust, guide, draw, and say how probable they were.

Knows rows and their histories, not models. Called by the runner.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
from torch import Tensor

from engine.adjust import History, adjust, asks
from engine.beams import Candidates, num_candidates
from engine.errors import GuideLimit
from engine.guide import Guides
from engine.largest import largest, logsumexp
from engine.logprobs import logprobs_of
from engine.plan import ScheduledSequence, StepResult
from engine.request import SamplingParams
from engine.sampler import sample

NOT_FINITE = "the model's logits are not finite for this sequence"


_OUTSIDE = np.float32(-2e30)
"""Of tokens that a guide does not allow: lower than what is barred for other reasons."""


def choose_tokens(
    logits: Tensor,
    rows: Sequence[ScheduledSequence],
    eos_token_ids: Collection[int],
    guides: Callable[[], Guides],
) -> StepResult:
    """A token for every row.

    Args:
        logits: float32 ``[rows, vocab_size]``; not changed.
        rows: those that sample, in that order.
        guides: called where a row has a guide.
    """
    sampling = [row.sampling for row in rows]
    adjusted, cut_short = _adjusted(logits, rows, eos_token_ids, guides)
    tokens = sample(adjusted, sampling, [row.end for row in rows])
    wanted = [each.num_top_logprobs for each in sampling]
    told = [r for r, t in enumerate(tokens) if t is not None and wanted[r] is not None]
    records = logprobs_of(
        logits[told] if told else logits[:0],
        [token for r in told if (token := tokens[r]) is not None],
        [count for r in told if (count := wanted[r]) is not None],
    )
    return StepResult(
        {
            row.request_id: t
            for row, t in zip(rows, tokens, strict=True)
            if t is not None and row.request_id not in cut_short
        },
        {row.request_id: NOT_FINITE for row, t in zip(rows, tokens, strict=True) if t is None},
        {rows[r].request_id: record for r, record in zip(told, records, strict=True)},
        cut_short,
        {
            row.request_id: _candidates(logits[r], adjusted[r], row.sampling, eos_token_ids)
            for r, row in enumerate(rows)
            if row.sampling.beam_search is not None and tokens[r] is not None
        },
    )


def _candidates(
    logits: Tensor, adjusted: Tensor, sampling: SamplingParams, eos_token_ids: Collection[int]
) -> Candidates:
    """What a beam may go on with. Adjustments count on top of the model's own logprobs."""
    assert sampling.beam_search is not None
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    count = min(num_candidates(sampling.beam_search, len(ends)), len(adjusted))
    values, ids = largest(adjusted.unsqueeze(0), count)
    logprobs = values.double() - float(logsumexp(logits.unsqueeze(0))[0])
    return tuple(zip(ids[0].tolist(), logprobs[0].tolist(), strict=True))


def _adjusted(
    logits: Tensor,
    rows: Sequence[ScheduledSequence],
    eos_token_ids: Collection[int],
    guides: Callable[[], Guides],
) -> tuple[Tensor, dict[str, str]]:
    """The logits to choose from; and whose guide gave up, with the reason."""
    asking = [
        r
        for r, row in enumerate(rows)
        if row.sampling.guide or asks(row.sampling, len(row.output_token_ids))
    ]
    if not asking:
        return logits, {}
    changed = logits[asking]
    histories = [
        History(rows[r].sampling, rows[r].prompt_token_ids, rows[r].output_token_ids)
        for r in asking
    ]
    adjust(changed.numpy(), histories, eos_token_ids)
    cut_short: dict[str, str] = {}
    for at, r in enumerate(asking):
        if (guide := rows[r].sampling.guide) is not None:
            try:
                words = guides().mask(rows[r].request_id, guide, rows[r].output_token_ids)
            except GuideLimit as limit:
                cut_short[rows[r].request_id] = str(limit)
                continue
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: logits.shape[1]]
            changed[at].numpy()[allowed == 0] = _OUTSIDE
    if len(asking) == len(rows):
        return changed, cut_short
    adjusted = logits.clone()
    adjusted[asking] = changed
    return adjusted, cut_short
