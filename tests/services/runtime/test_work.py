"""Requests travel between router and instances unchanged."""

from dataclasses import fields

import pytest

from engine.request import BeamSearch, Guide, GuideKind, Request, SamplingParams
from protos import worker_pb2 as wire
from services.runtime.work import parse_work_request, work_request_message

# All fractions are exact in float32, which is what the wire carries.
EVERYTHING = SamplingParams(
    temperature=0.5,
    top_p=0.25,
    top_k=7,
    seed=2**64 - 1,
    max_tokens=99,
    stop=("a", "b"),
    stop_token_ids=(3, 4),
    ignore_eos=True,
    skip_special_tokens=False,
    min_p=0.125,
    typical_p=0.75,
    presence_penalty=-1.5,
    frequency_penalty=1.5,
    repetition_penalty=1.25,
    logit_bias=((5, -100.0), (9, 2.5)),
    min_tokens=3,
    include_stop=True,
    bad_words=((3,), (4, 5)),
    logprobs=0,
    prompt_logprobs=5,
    n=2,
    best_of=3,
    beam_search=BeamSearch(4, 0.5, True),
    guide=Guide(GuideKind.REGEX, "[a-z]+"),
)


def _carried(request: Request) -> Request:
    sent = work_request_message(request).SerializeToString()
    return parse_work_request(wire.WorkRequest.FromString(sent))


def test_every_field_arrives() -> None:
    default = SamplingParams()
    same = [
        f.name for f in fields(default) if getattr(EVERYTHING, f.name) == getattr(default, f.name)
    ]
    assert not same, "a field whose value here is its default proves nothing"
    request = Request("r", (1, 2, 3), EVERYTHING, -4, "salt", (8, 9))
    assert _carried(request) == request


def test_defaults_stay_defaults() -> None:
    assert _carried(Request("r", (1,))) == Request("r", (1,))


@pytest.mark.parametrize(
    "guide",
    [
        Guide(GuideKind.JSON_SCHEMA, '{"type": "integer"}'),
        Guide(GuideKind.JSON_OBJECT),
        Guide(GuideKind.GRAMMAR, 'start: "a"'),
        Guide(GuideKind.CHOICE, choices=("yes", "no")),
    ],
    ids=lambda guide: guide.kind,
)
def test_guides_arrive(guide: Guide) -> None:
    request = Request("r", (1,), SamplingParams(guide=guide))
    assert _carried(request) == request
