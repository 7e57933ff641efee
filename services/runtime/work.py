"""Requests between router and instances: the typed request to its message, and back.

The router has validated everything; nothing is checked again here.
"""

from dataclasses import replace

from engine.request import Request, SamplingParams
from protos import inference_pb2 as public
from protos import worker_pb2 as wire


def parse_work_request(message: wire.WorkRequest) -> Request:
    """The engine's request from a router's message, whose sampling is complete."""
    sampling = message.sampling
    return Request(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            stop=tuple(sampling.stop),
            stop_token_ids=tuple(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            skip_special_tokens=sampling.skip_special_tokens,
        ),
        priority=message.priority,
    )


def as_attempt(request: Request, number: int) -> Request:
    """The same request under an id that is used once in an engine.

    A router may try a request again on the same instance while the last attempt still lets go of
    its blocks: the two must never be mistaken for each other.
    """
    return replace(request, request_id=f"{request.request_id}#{number}")


def work_request_message(request: Request) -> wire.WorkRequest:
    """The message for ``request``, every sampling field set."""
    sampling = request.sampling
    return wire.WorkRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=public.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            skip_special_tokens=sampling.skip_special_tokens,
        ),
        priority=request.priority,
    )
