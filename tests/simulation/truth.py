"""What must be true: the tokens of every request, and the KV of every block anybody publishes.

``engine.mock_runner`` makes both pure functions of the prompt, so that whatever happened on the
way can be judged without having been there.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from engine.beams import Beams, Hypothesis
from engine.kv.prefix import RUN_TOKENS, extend_chain, root_hash
from engine.mock_runner import MockKvCache, answer, mean_logprob, next_candidates
from engine.mock_runner import row_checksums as checksums
from engine.request import FinishReason, Request, forks_of
from tests.simulation.loop import Process


class Wrong(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """What a block with this hash holds."""

    token_ids: tuple[int, ...]
    first_position: int
    layers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, undisturbed."""

    token_ids: list[int]
    text: str
    stopped_by: str
    """Empty: it is as long as it may be."""
    num_untold_tokens: int = 0
    """Of answers that were written and not told."""


def _until_stop(token_ids: list[int], stops: tuple[str, ...]) -> Answer:
    """A token is a letter: the stop string ends with the last token and is not in the text."""
    text = bytes(token_ids).decode()
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return Answer(token_ids, text, "")
    at, stop = min(found)
    return Answer(token_ids[: at + len(stop)], text[:at], stop)


def _of_hypothesis(found: Hypothesis) -> Answer:
    """The token that stopped it is not in the text."""
    *said, last = found.token_ids
    if found.finish_reason is FinishReason.LENGTH:
        return Answer([*said, last], bytes([*said, last]).decode(), "")
    return Answer(said, bytes(said).decode(), str(last))


class Truth:
    """Everything that may be answered and cached in one run."""

    def __init__(self, model_digest: str, num_layers: int) -> None:
        self._model_digest = model_digest
        self._num_layers = num_layers
        self._blocks: dict[bytes, _Rows] = {}

    def add(self, request: Request) -> list["Answer"]:
        """The answers to ``request``, whole, in the order in which they are told."""
        if request.sampling.beam_search is not None:
            return self._search(request)
        answers = []
        for fork in forks_of(request):
            tokens = answer(fork.prompt_token_ids, fork.sampling.max_tokens, fork.sampling)
            self._note(request.salt, [*fork.prompt_token_ids, *tokens])
            answers.append(_until_stop(tokens, fork.sampling.stop))
        if request.sampling.is_ranked:
            prompt = request.prompt_token_ids
            answers.sort(key=lambda each: -mean_logprob(prompt, each.token_ids))
        told, untold = answers[: request.sampling.n], answers[request.sampling.n :]
        count = sum(len(each.token_ids) for each in untold)
        return [replace(told[0], num_untold_tokens=count), *told[1:]]

    def _search(self, request: Request) -> list["Answer"]:
        """Every beam there ever is may be published."""
        sampling, prompt = request.sampling, request.prompt_token_ids
        assert sampling.beam_search is not None
        width = sampling.beam_search.width

        def ends(token_id: int, number: int) -> FinishReason | None:
            if token_id in sampling.stop_token_ids:
                return FinishReason.STOP
            return FinishReason.LENGTH if number == sampling.max_tokens else None

        beams = Beams(request)
        outputs: dict[str, list[int]] = {request.request_id: []}
        while outputs:
            for output in outputs.values():
                self._note(request.salt, [*prompt, *output])
            candidates = {i: next_candidates((*prompt, *o), width) for i, o in outputs.items()}
            outputs = {
                beams.request_id(number): [*outputs[beams.request_id(c.parent)], c.token_id]
                for number, c in beams.advance(candidates, outputs, ends).items()
            }
        return [_of_hypothesis(each) for each in beams.finished[: sampling.n]]

    def _note(self, salt: str, token_ids: list[int]) -> None:
        hashes = extend_chain(root_hash(self._model_digest, salt=salt), token_ids)
        if all(block_hash in self._blocks for block_hash in hashes):
            return
        layers = [checksums(layer, token_ids) for layer in range(self._num_layers)]
        for index, block_hash in enumerate(hashes):
            run = slice(index * RUN_TOKENS, (index + 1) * RUN_TOKENS)
            rows = tuple(tuple(layer[run]) for layer in layers)
            self._blocks[block_hash] = _Rows(tuple(token_ids[run]), run.start, rows)

    def check_published(
        self, process: Process, cache: MockKvCache, published: Iterable[tuple[bytes, int]]
    ) -> None:
        """Every (hash, block) holds just what the hash says.

        Raises:
            Wrong: it does not.
        """
        for block_hash, block_id in published:
            where = f"{process.name}: block {block_id} is published"
            rows = self._blocks.get(block_hash)
            if rows is None:
                raise Wrong(f"{where}, but it is the beginning of no request")
            for layer, expected in enumerate(rows.layers):
                found = cache.rows(layer, block_id)
                if not np.array_equal(found, np.array(expected, dtype=np.uint64)):
                    raise Wrong(f"{where}, but layer {layer} holds something else")
