"""Requests between router and instances: the typed request to its message, and back.

Also what an engine says of single tokens.

The router has validated everything; nothing is checked again here.
"""

from dataclasses import replace
from typing import Any

from engine.request import (
    BeamSearch,
    Guide,
    GuideKind,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from protos import inference_pb2 as public
from protos import worker_pb2 as wire

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "include_stop",
    "n",
    "best_of",
)
"""Numbers and flags that are called the same on both sides and are always set."""
_TUPLES = ("stop", "stop_token_ids")
_OPTIONAL = ("logprobs", "prompt_logprobs")


def parse_work_request(message: wire.WorkRequest) -> Request:
    """The engine's request from a router's message, whose sampling is complete."""
    return Request(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=_sampling(message.sampling),
        priority=message.priority,
        salt=message.cache_salt,
        output_token_ids=tuple(message.output_token_ids),
    )


def as_attempt(request: Request, number: int) -> Request:
    """The same request under an id that is used once in an engine.

    A router may try a request again on the same instance while the last attempt still lets go of
    its blocks: the two must never be mistaken for each other.
    """
    return replace(request, request_id=f"{request.request_id}#{number}")


def work_request_message(request: Request) -> wire.WorkRequest:
    """The message for ``request``, every sampling field set."""
    return wire.WorkRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=_sampling_message(request.sampling),
        priority=request.priority,
        cache_salt=request.salt,
        output_token_ids=request.output_token_ids,
    )


def logprobs_message(record: TokenLogprobs) -> public.TokenLogprobs:
    """What an engine says of one token, as clients and other instances hear it."""
    return public.TokenLogprobs(
        token=public.TokenLogprob(
            token_id=record.token_id, logprob=record.logprob, rank=record.rank
        ),
        top=[
            public.TokenLogprob(token_id=token_id, logprob=logprob, rank=rank)
            for rank, (token_id, logprob) in enumerate(record.top, 1)
        ],
    )


def parse_logprobs(message: public.TokenLogprobs) -> TokenLogprobs:
    """The inverse of ``logprobs_message``."""
    token = message.token
    top = tuple((each.token_id, each.logprob) for each in message.top)
    return TokenLogprobs(token.token_id, token.logprob, token.rank, top)


def _sampling(message: public.SamplingParams) -> SamplingParams:
    beam = message.beam_search
    values: dict[str, Any] = {n: getattr(message, n) for n in _SAME_NAME if _says(message, n)}
    values |= {name: tuple(getattr(message, name)) for name in _TUPLES}
    values |= {n: getattr(message, n) if message.HasField(n) else None for n in _OPTIONAL}
    if message.HasField("beam_search"):
        values["beam_search"] = BeamSearch(beam.width, beam.length_penalty, beam.early_stopping)
    return SamplingParams(
        **values,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        bad_words=tuple(tuple(word.ids) for word in message.bad_word_token_ids),
        guide=parse_guide(message.guided),
    )


def _says(message: public.SamplingParams, name: str) -> bool:
    """What an order leaves out stands for the engine's default, as it does for a client's."""
    field = message.DESCRIPTOR.fields_by_name[name]
    return not field.has_presence or bool(message.HasField(name))


def parse_guide(message: public.GuidedDecoding) -> Guide | None:
    """None: it says nothing."""
    name = message.WhichOneof("kind")
    match name and GuideKind(name):
        case None:
            return None
        case GuideKind.CHOICE:
            return Guide(GuideKind.CHOICE, choices=tuple(message.choice.choices))
        case GuideKind.JSON_OBJECT:
            return Guide(GuideKind.JSON_OBJECT)
        case kind:
            return Guide(GuideKind(kind), getattr(message, str(kind)))


def _sampling_message(sampling: SamplingParams) -> public.SamplingParams:
    message = public.SamplingParams(
        **{name: getattr(sampling, name) for name in (*_SAME_NAME, *_TUPLES)},
        logit_bias=dict(sampling.logit_bias),
        bad_word_token_ids=[public.TokenIds(ids=word) for word in sampling.bad_words],
    )
    for name in _OPTIONAL:
        if (count := getattr(sampling, name)) is not None:
            setattr(message, name, count)
    if beam := sampling.beam_search:
        message.beam_search.width = beam.width
        message.beam_search.length_penalty = beam.length_penalty
        message.beam_search.early_stopping = beam.early_stopping
    if guide := sampling.guide:
        _fill_guide(message.guided, guide)
    return message


def _fill_guide(message: public.GuidedDecoding, guide: Guide) -> None:
    match guide.kind:
        case GuideKind.CHOICE:
            message.choice.choices.extend(guide.choices)
        case GuideKind.JSON_OBJECT:
            message.json_object = True
        case kind:
            setattr(message, kind, guide.source)
