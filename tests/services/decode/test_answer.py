"""Text, stops and exactly one terminal event, whatever ends an answer."""

import pytest

from engine.plan import Sampled
from engine.request import FinishReason, Request, SamplingParams, TokenLogprobs
from engine.tokenizer import ByteTokenizer
from protos import inference_pb2 as public
from protos import worker_pb2 as wire
from services.decode.answer import Answer
from services.runtime.errors import Internal, Unavailable

EOS = ByteTokenizer().eos_token_ids[0]


class Reader:
    """What arrives at the router. ``earlier`` is what an earlier attempt wrote."""

    def __init__(self, earlier: bytes = b"", **sampling: object) -> None:
        self.events: list[wire.DecodeEvent] = []
        self.now_s = 0.0
        params = SamplingParams(max_tokens=99, **sampling)
        request = Request("r", (104, 105), params, output_token_ids=tuple(earlier))
        self.answer = Answer(request, ByteTokenizer(), self.events.append, lambda: self.now_s)

    def push(self, text: bytes, last: FinishReason | None = None) -> None:
        for i, token_id in enumerate(text):
            reason = last if i == len(text) - 1 else None
            self.answer.push(Sampled("r", token_id, reason))

    @property
    def said(self) -> list[public.Tokens]:
        """Tokens in events of their own, and the last ones."""
        return [e.finished.last if e.HasField("finished") else e.tokens for e in self.events]

    @property
    def text(self) -> str:
        return "".join(tokens.text for tokens in self.said)

    @property
    def token_ids(self) -> bytes:
        return b"".join(bytes(tokens.token_ids) for tokens in self.said)

    @property
    def finished(self) -> wire.DecodeFinished:
        assert [e.WhichOneof("event") for e in self.events].count("finished") == 1
        assert self.events[-1].HasField("finished")
        return self.events[-1].finished


def test_length_counts_the_last_token() -> None:
    reader = Reader()
    reader.push(b"hello", FinishReason.LENGTH)
    assert (reader.text, reader.token_ids) == ("hello", b"hello")
    assert reader.finished.finish_reason == public.FINISH_REASON_LENGTH
    assert reader.finished.output_tokens == 5


def test_eos_is_not_part_of_the_answer() -> None:
    reader = Reader()
    reader.push(b"hi")
    reader.answer.push(Sampled("r", EOS, FinishReason.STOP))
    assert (reader.text, reader.token_ids) == ("hi", b"hi")
    assert reader.finished.output_tokens == 2
    assert reader.finished.stop_reason == ""


def test_a_stop_token_id_is_named() -> None:
    reader = Reader(stop_token_ids=(33,))
    reader.push(b"hi!", FinishReason.STOP)
    assert reader.text == "hi"
    assert reader.finished.stop_reason == "33"


def test_a_stop_string_cuts_the_text_and_ends_once() -> None:
    reader = Reader(stop=("END",))
    reader.push(b"one ENtwo END of it")
    assert reader.text == "one ENtwo "
    assert reader.finished.finish_reason == public.FINISH_REASON_STOP
    assert reader.finished.stop_reason == "END"
    reader.push(b"more", FinishReason.LENGTH)
    assert reader.finished


def test_what_was_held_back_for_a_stop_string_is_given_at_the_end() -> None:
    reader = Reader(stop=("END",))
    reader.push(b"the EN", FinishReason.LENGTH)
    assert reader.text == "the EN"
    assert reader.finished.finish_reason == public.FINISH_REASON_LENGTH


def test_a_character_split_over_tokens_comes_whole() -> None:
    reader = Reader()
    reader.push("é🦊".encode(), FinishReason.LENGTH)
    pieces = [tokens.text for tokens in reader.said if tokens.text]
    assert pieces == ["é", "🦊"]


def test_an_incomplete_character_at_the_end_is_shown_as_such() -> None:
    reader = Reader()
    reader.push("🦊".encode()[:2])
    reader.answer.push(Sampled("r", EOS, FinishReason.STOP))
    assert reader.text == "\ufffd"


def test_a_stop_string_completed_by_the_flush_still_stops() -> None:
    reader = Reader(stop=("\ufffd",))
    reader.push(b"a" + "🦊".encode()[:2], FinishReason.LENGTH)
    assert reader.text == "a"
    assert reader.finished.stop_reason == "\ufffd"


def test_failing_after_the_end_says_nothing() -> None:
    reader = Reader()
    reader.push(b"x", FinishReason.LENGTH)
    reader.answer.fail(Internal("late"))
    assert reader.finished


def test_failing_first_is_the_only_terminal_event() -> None:
    reader = Reader()
    reader.push(b"x")
    reader.answer.fail(Unavailable("gone"))
    reader.push(b"y", FinishReason.LENGTH)
    kinds = [e.WhichOneof("event") for e in reader.events]
    assert kinds == ["tokens", "failed"]


def test_times_of_a_prompt_prefilled_here() -> None:
    reader = Reader()
    reader.now_s = 1.0
    reader.answer.picked(16)
    reader.now_s = 3.0
    reader.push(b"a")
    reader.now_s = 3.5
    reader.push(b"b", FinishReason.LENGTH)
    done = reader.finished
    assert (done.queue_s, done.prefill_s, done.first_decode_s) == (1.0, 2.0, 0.5)
    assert done.cached_tokens == 16


TEXT = "héllo wörld 🙂, abc abd!".encode()


@pytest.mark.parametrize("cut", range(len(TEXT)))
def test_an_answer_goes_on_after_any_token(cut: int) -> None:
    """Cut inside characters and inside what might become a stop string."""
    whole, before = Reader(stop=("abd",)), Reader(stop=("abd",))
    whole.push(TEXT)
    before.push(TEXT[:cut])
    if before.events and before.events[-1].HasField("finished"):
        return
    after = Reader(TEXT[:cut], stop=("abd",))
    after.push(TEXT[cut:])
    assert before.text + after.text == whole.text
    assert before.token_ids + after.token_ids == whole.token_ids
    ends = [reader.finished for reader in (whole, after)]
    assert ends[0].output_tokens == ends[1].output_tokens
    assert ends[0].stop_reason == ends[1].stop_reason == "abd"


@pytest.mark.parametrize("reason", [None, FinishReason.LENGTH, FinishReason.STOP])
def test_the_prompt_is_told_once_however_the_first_token_ends(reason: FinishReason | None) -> None:
    reader = Reader(prompt_logprobs=0)
    record = TokenLogprobs(105, -2.5, 7)
    token_id = EOS if reason is FinishReason.STOP else 97
    reader.answer.push(Sampled("r", token_id, reason, prompt_logprobs=(record,)))
    if reason is None:
        reader.push(b"b")
    first, second = [told for tokens in reader.said for told in tokens.prompt_logprobs]
    assert (first.token.token_id, first.token.rank) == (104, 0)
    assert (second.token.token_id, second.token.logprob, second.token.rank) == (105, -2.5, 7)


def test_a_later_attempt_does_not_tell_the_prompt_again() -> None:
    reader = Reader(earlier=b"a", prompt_logprobs=0)
    reader.push(b"b")
    assert not any(tokens.prompt_logprobs for tokens in reader.said)


def test_an_answer_that_cannot_go_on_is_an_error_after_what_it_said() -> None:
    reader = Reader(stop=("world",))
    reader.push(b"hello wor")
    reader.answer.cut_short("the guide gave up")
    reader.answer.cut_short("twice")
    assert (reader.text, reader.token_ids) == ("hello wor", b"hello wor")
    assert reader.finished.finish_reason == public.FINISH_REASON_ERROR
    assert reader.finished.stop_reason == "the guide gave up"
