"""Several answers as one stream of events, and that stream as server-sent events.

Knows nothing of HTTP or of how answers come about. Used by ``openai_api``.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncGenerator, Iterator, Sequence

from engine.request import Request
from protos import inference_pb2 as public
from services.router.openai_answers import (
    Choice,
    Envelope,
    Form,
    Json,
    count_rest,
    error_object,
)
from services.router.serving import Answer
from services.runtime.errors import to_service_error

Output = public.Tokens | public.Finished
ChoiceEvent = public.Accepted | Output
Answers = AsyncGenerator[tuple[Choice, ChoiceEvent], None]

DONE = b"data: [DONE]\n\n"


async def merge(
    streams: Sequence[AsyncGenerator[Answer, None]],
) -> AsyncGenerator[tuple[int, Answer], None]:
    """Events of all streams as they come, with the stream's index. The first failure ends all."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for event in only:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Answer] | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(queue, i, each)) for i, each in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is not None:
                yield item
                continue
            running -= 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    queue: "asyncio.Queue[tuple[int, Answer] | None]",
    index: int,
    stream: AsyncGenerator[Answer, None],
) -> None:
    try:
        async with contextlib.aclosing(stream):
            async for event in stream:
                queue.put_nowait((index, event))
    finally:
        queue.put_nowait(None)


def choices_of(requests: Sequence[Request], echoes: Sequence[str | None]) -> list[list[Choice]]:
    """The choices of each request, numbered through.

    Args:
        echoes: what the answers to each begin with.
    """
    numbers = itertools.count()
    return [
        [Choice(next(numbers), request, echo=echo) for _ in range(request.sampling.n)]
        for request, echo in zip(requests, echoes, strict=True)
    ]


def by_choice(choices: Sequence[Choice], event: Answer) -> Iterator[tuple[Choice, ChoiceEvent]]:
    """What an event of one request means to its choices: each has its tokens and its end.

    The prompt, and answers that are not told, are counted once, with the first choice.
    """
    match event:
        case public.Accepted():
            yield from ((choice, event) for choice in choices)
        case public.Tokens():
            yield choices[event.index], event
            # The prompt is told once, with the first answer, and is that of all.
            for choice in choices if event.prompt_logprobs else ():
                if choice is not choices[event.index]:
                    yield choice, public.Tokens(prompt_logprobs=event.prompt_logprobs)
        case public.ChoiceFinished():
            choice = choices[event.index]
            choice.finished = public.Finished(
                finish_reason=event.finish_reason,
                stop_reason=event.stop_reason,
                usage=public.Usage(output_tokens=event.output_tokens),
            )
            yield choice, choice.finished
        case public.Finished() if len(choices) == 1 and choices[0].finished is None:
            choices[0].finished = event
            yield choices[0], event
        case public.Finished():
            # Those are open that an abort ended before their own end.
            for choice in [each for each in choices if each.finished is None]:
                choice.finished = public.Finished(finish_reason=event.finish_reason)
                yield choice, choice.finished
            count_rest(choices, event.usage)


def without_answer(event: ChoiceEvent) -> ChoiceEvent:
    """What is left of an answer of which only the prompt is wanted."""
    match event:
        case public.Tokens():
            return public.Tokens(prompt_logprobs=event.prompt_logprobs)
        case public.Finished():
            usage = public.Usage()
            usage.CopyFrom(event.usage)
            usage.output_tokens = 0
            return public.Finished(finish_reason=public.FINISH_REASON_LENGTH, usage=usage)
    return event


async def accepted(
    answers: Answers, count: int
) -> tuple[list[Choice], list[tuple[Choice, Output]]]:
    """Wait until all requests are accepted.

    Returns:
        The choices in order, and the events that came before the last was accepted.
    """
    choices: list[Choice] = []
    early: list[tuple[Choice, Output]] = []
    while len(choices) < count:
        choice, event = await anext(answers)
        if isinstance(event, public.Accepted):
            choices.append(choice)
        else:
            early.append((choice, event))
    return sorted(choices, key=lambda choice: choice.index), early


async def sse_events(
    form: Form,
    envelope: Envelope,
    choices: Sequence[Choice],
    early: Sequence[tuple[Choice, Output]],
    answers: Answers,
) -> AsyncGenerator[bytes, None]:
    """A stream as OpenAI clients read it. A failure is its last event, without ``[DONE]``."""
    with_usage = {"usage": None} if envelope.include_usage else {}
    async with contextlib.aclosing(answers):
        try:
            for choice in choices:
                if opening := form.opening(envelope, choice):
                    yield _event(opening | with_usage)
            for choice, event in early:
                if chunk := _chunk(form, envelope, choice, event):
                    yield _event(chunk | with_usage)
            async for choice, answer in answers:
                assert not isinstance(answer, public.Accepted)
                if chunk := _chunk(form, envelope, choice, answer):
                    yield _event(chunk | with_usage)
        except Exception as unexpected:
            yield _event(error_object(to_service_error(unexpected)))
            return
        if envelope.include_usage:
            yield _event(form.usage_chunk(envelope, choices))
        yield DONE


def _chunk(form: Form, envelope: Envelope, choice: Choice, event: Output) -> Json | None:
    """None: nothing to say yet, the text of a token is held back."""
    if isinstance(event, public.Finished):
        choice.finished = event
        return form.closing(envelope, choice)
    if not (event.text or event.logprobs or event.prompt_logprobs or envelope.return_token_ids):
        return None
    return form.chunk(envelope, choice, event)


def _event(content: Json) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
