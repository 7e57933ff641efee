"""Several answers: told as they come, or ranked and told at the end."""

from typing import Any

from engine.beams import Hypothesis
from engine.plan import Sampled
from engine.request import BeamSearch, FinishReason, Request, SamplingParams, TokenLogprobs
from engine.tokenizer import ByteTokenizer
from protos import inference_pb2 as public
from protos import worker_pb2 as wire
from services.decode.choices import Choices
from services.runtime.errors import Internal

EOS = ByteTokenizer().eos_token_ids[0]


class Reader:
    """What arrives at the router."""

    def __init__(self, **sampling: Any) -> None:
        self.events: list[wire.DecodeEvent] = []
        request = Request("r", (104, 105), SamplingParams(max_tokens=99, **sampling))
        self.now_s = 10.0
        self.choices = Choices(request, ByteTokenizer(), self.events.append, lambda: self.now_s)

    def push(self, index: int, text: bytes, logprob: float, last: FinishReason) -> None:
        for i, token_id in enumerate(text):
            reason = last if i == len(text) - 1 else None
            told = TokenLogprobs(token_id, logprob, 1)
            prompt = (TokenLogprobs(105, -1.0, 1),) if i == index == 0 else ()
            self.choices.push(index, Sampled("r", token_id, reason, told, prompt))

    def told(self) -> list[tuple[int, str]]:
        return [(e.tokens.index, e.tokens.text) for e in self.events if e.HasField("tokens")]

    def ends(self) -> list[public.ChoiceFinished]:
        return [e.choice_finished for e in self.events if e.HasField("choice_finished")]


def test_the_most_probable_ones_token_for_token_are_told() -> None:
    reader = Reader(n=2, best_of=3, prompt_logprobs=0)
    reader.push(0, b"worst", -3.0, FinishReason.LENGTH)
    reader.push(1, b"long but good", -1.0, FinishReason.LENGTH)
    assert not reader.events
    reader.push(2, b"good", -1.5, FinishReason.LENGTH)
    assert reader.told() == [(0, "long but good"), (1, "good")]
    assert [(end.index, end.output_tokens) for end in reader.ends()] == [(0, 13), (1, 4)]
    assert [end.cumulative_logprob for end in reader.ends()] == [-13.0, -6.0]
    # Nobody asked for logprobs, and the prompt is told once, with the best.
    tokens = [event.tokens for event in reader.events if event.HasField("tokens")]
    assert not any(each.logprobs for each in tokens)
    assert [len(each.prompt_logprobs) for each in tokens] == [2, 0]
    assert [event.WhichOneof("event") for event in reader.events].count("finished") == 1
    assert reader.events[-1].finished.output_tokens == 5 + 13 + 4


def test_the_end_of_an_answer_counts() -> None:
    """An EOS that nobody expected makes an answer worse, though it is not part of it."""
    reader = Reader(n=1, best_of=2, logprobs=0)
    reader.push(0, b"ab", -1.0, FinishReason.LENGTH)
    for token_id, logprob in ((97, -0.5), (EOS, -9.0)):
        reason = FinishReason.STOP if token_id == EOS else None
        told = TokenLogprobs(token_id, logprob, 1)
        reader.choices.push(1, Sampled("r", token_id, reason, told))
    assert reader.told() == [(0, "ab")]
    assert len(reader.events[0].tokens.logprobs) == 2


def test_a_search_tells_its_best_in_order() -> None:
    reader = Reader(n=2, beam_search=BeamSearch(3))
    found = [
        Hypothesis((*b"one", EOS), FinishReason.STOP, -2.0, -0.5),
        Hypothesis(tuple(b"two"), FinishReason.LENGTH, -1.8, -0.6),
        Hypothesis(tuple(b"three"), FinishReason.LENGTH, -3.5, -0.7),
    ]
    reader.choices.found(found)
    assert reader.told() == [(0, "one"), (1, "two")]
    assert [end.cumulative_logprob for end in reader.ends()] == [-2.0, -1.8]
    assert [end.finish_reason for end in reader.ends()] == [
        public.FINISH_REASON_STOP,
        public.FINISH_REASON_LENGTH,
    ]
    assert reader.choices.has_ended and reader.events[-1].finished.output_tokens == 6


def test_a_search_that_finds_too_little_fails() -> None:
    reader = Reader(n=2, beam_search=BeamSearch(3))
    reader.choices.found([Hypothesis((97,), FinishReason.LENGTH, -1.0, -1.0)])
    assert [event.WhichOneof("event") for event in reader.events] == ["failed"]
    assert reader.choices.has_ended


def test_a_failure_is_told_once_and_nothing_after_it() -> None:
    reader = Reader(n=1, best_of=3)
    reader.push(0, b"ab", -1.0, FinishReason.LENGTH)
    reader.choices.fail(Internal("broken"))
    reader.push(1, b"ab", -1.0, FinishReason.LENGTH)
    assert [event.WhichOneof("event") for event in reader.events] == ["failed"]
    assert reader.choices.has_ended


def test_searching_is_no_part_of_reading_the_prompt() -> None:
    reader = Reader(n=1, beam_search=BeamSearch(2))
    reader.now_s += 1
    reader.choices.picked(0)
    reader.now_s += 2
    reader.choices.searching()
    reader.now_s += 50
    reader.choices.searching()  # again, after a preemption
    reader.choices.found([Hypothesis((97,), FinishReason.LENGTH, -1.0, -1.0)])
    finished = reader.events[-1].finished
    assert (finished.queue_s, finished.prefill_s) == (1.0, 2.0)
