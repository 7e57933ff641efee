"""What a step means to the beams of a search: who forks, who is dropped, and the end.

A beam is a sequence of its own. Those of a search share blocks, copy-on-write, are always in the
same step, and live and end together; the KV of a dropped one is freed at once. Knows blocks and
sequences, not logits. Owned and called by ``flight``, under the scheduler's lock.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from engine.beams import Beams, Candidates
from engine.kv.manager import KvManager
from engine.plan import BeamsEnded, EngineEvent
from engine.request import FinishReason, Request, Sequence
from engine.roster import Roster


class BeamSteps:
    """Advances searches.

    Args:
        finish_reason: how an answer ends with this token as its n-th, if it does.
        end: end one sequence; its blocks are freed.
    """

    def __init__(
        self,
        roster: Roster,
        kv: KvManager,
        finish_reason: Callable[[Request, int, int], FinishReason | None],
        end: Callable[[Sequence], None],
    ) -> None:
        self._roster = roster
        self._kv = kv
        self._finish_reason = finish_reason
        self._end = end

    def members(self, beams: Beams) -> list[Sequence]:
        """The sequences of the running beams."""
        return [s for each in beams.request_ids if (s := self._roster.get(each)) is not None]

    def advance(self, beams: Beams, candidates: Mapping[str, Candidates]) -> list[EngineEvent]:
        """The KV of all running beams exists, and these tokens may follow."""
        before = {sequence.request_id: sequence for sequence in self.members(beams)}
        outputs = {request_id: each.output_token_ids for request_id, each in before.items()}
        seats = beams.advance(
            candidates, outputs, lambda token, n: self._finish_reason(beams.request, token, n)
        )
        if not seats:
            for sequence in before.values():
                self._end(sequence)
            return [BeamsEnded(beams.request.request_id, beams.finished)]
        ids = {beams.request_id(number): child for number, child in seats.items()}
        parents = {each: before[beams.request_id(child.parent)] for each, child in ids.items()}
        for request_id, parent in parents.items():
            if parent.request_id != request_id:
                self._fork(parent, request_id, before.get(request_id))
        for request_id, sequence in before.items():
            if request_id not in ids:
                self._end(sequence)
        for request_id, child in ids.items():
            beam = self._roster.get(request_id)
            assert beam is not None
            beam.output_token_ids.append(child.token_id)
        first = self._roster.get(beams.request.request_id)
        assert first is not None
        first.num_unborn_forks = beams.request.sampling.num_candidates - len(ids)
        return []

    def _fork(self, parent: Sequence, request_id: str, dropped: Sequence | None) -> None:
        """``request_id`` goes on from ``parent``, in the place of a beam that is dropped or new."""
        if dropped is None:
            self._kv.fork(parent.request_id, request_id)
            self._roster.fork(parent, replace(parent.request, request_id=request_id))
            return
        self._kv.free(request_id)
        self._kv.fork(parent.request_id, request_id)
        dropped.output_token_ids = list(parent.output_token_ids)
