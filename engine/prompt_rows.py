"""Logprobs of prompts, as their rows are computed: the row of token i says how probable i + 1 was.

Row blocks come out of the model one after the other, so logits of a whole prompt never exist at
once. Knows rows of one step, not requests' lives. Called by the runner.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine.logprobs import logprobs_of
from engine.models.interface import OtherRows
from engine.plan import ScheduledSequence
from engine.request import TokenLogprobs


class _Row(NamedTuple):
    row: int
    """Of the batch."""
    request_id: str
    token_id: int
    """The prompt token that came next."""
    num_top: int


class PromptRows:
    """The rows of one step that tell, and what they told."""

    def __init__(self, sequences: Sequence[ScheduledSequence]) -> None:
        self._rows: list[_Row] = []
        self._records: list[TokenLogprobs] = []
        first_row = 0
        for each in sequences:
            num_top = each.sampling.prompt_logprobs or 0
            for i in range(each.num_prompt_rows):
                token_id = each.prompt_token_ids[each.start + i + 1]
                self._rows.append(_Row(first_row + i, each.request_id, token_id, num_top))
            first_row += len(each.token_ids)

    @property
    def wanted(self) -> OtherRows | None:
        """What the model is asked for; None: nothing."""
        return OtherRows([each.row for each in self._rows], self._take) if self._rows else None

    def told(self) -> dict[str, tuple[TokenLogprobs, ...]]:
        """request_id -> records of the tokens after its rows, once the model has run."""
        found: dict[str, list[TokenLogprobs]] = defaultdict(list)
        for row, record in zip(self._rows, self._records, strict=True):
            found[row.request_id].append(record)
        return {request_id: tuple(records) for request_id, records in found.items()}

    def _take(self, logits: Tensor) -> None:
        first = len(self._records)
        rows = self._rows[first : first + len(logits)]
        token_ids, counts = [r.token_id for r in rows], [r.num_top for r in rows]
        self._records += logprobs_of(logits, token_ids, counts)
