"""The public gRPC face: ``kvrelay.v1.Inference``.

Translates messages and codes; a call that ends early closes the answer, which stops the work.
Mounted by ``app``.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NoReturn

import grpc

from engine.request import Guide
from protos import inference_pb2 as public
from protos import inference_pb2_grpc
from services.router.chats import (
    MAX_CALLS,
    MAX_TOOLS,
    Chat,
    ChatTurn,
    Tool,
    ToolCall,
    check_count,
    check_number_of_messages,
    check_tools,
    parse_object,
)
from services.router.intake import Prompt, RawRequest, check_client_id
from services.router.sampling import RawSampling, Spelling
from services.router.served_model import ServedModel
from services.router.serving import Answer, Serving
from services.router.several import RawBeamSearch
from services.router.trace import Origin, origin_of
from services.runtime.errors import (
    Aborted,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
)
from services.runtime.work import parse_guide

RETRY_AFTER_KEY = "retry-after-ms"
"""Trailing metadata of a refusal."""
READ_TIMEOUT_S = 120.0
"""A client that takes nothing of its answer for so long has given it up. Long, because reading
shows here only when a good part of the client's window, often 64 KiB, has been read."""
SPELLING = Spelling("sampling.")


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Generate, Abort, Tokenize, GetModel."""

    def __init__(
        self,
        model: ServedModel,
        serving: Serving,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._serving = serving
        self._clock = clock

    async def Generate(
        self, request: public.GenerateRequest, context: Any
    ) -> AsyncIterator[public.GenerateResponse]:
        received_s = self._clock()
        deadline_s = _deadline(context)
        try:
            with self._serving.enter(), _Reader(context) as reader:
                typed = await self._serving.parse(self._raw(request))
                answer = self._serving.answer(
                    typed, received_s, deadline_s, _origin(request, context)
                )
                async with contextlib.aclosing(answer):
                    async for event in answer:
                        response = _response(typed.request_id, request.client_request_id, event)
                        reader.waits()
                        yield response
                        reader.has_read()
        except ServiceError as error:
            await _abort(context, error)

    def _raw(self, request: public.GenerateRequest) -> RawRequest:
        try:
            check_client_id(request.client_request_id)
            return raw_request(request)
        except ServiceError as error:
            raise self._serving.refused(error) from None

    async def Abort(self, request: public.AbortRequest, context: Any) -> public.AbortResponse:
        return public.AbortResponse(found=self._serving.abort(request.request_id))

    async def Tokenize(
        self, request: public.TokenizeRequest, context: Any
    ) -> public.TokenizeResponse:
        try:
            prompt, name = _prompt(request)
            token_ids = await self._serving.token_ids(prompt, name)
        except ServiceError as error:
            await _abort(context, error)
        spell = self._model.tokenizer.id_to_token
        return public.TokenizeResponse(
            token_ids=token_ids, tokens=[spell(token_id) or "" for token_id in token_ids]
        )

    async def GetModel(
        self, request: public.GetModelRequest, context: Any
    ) -> public.GetModelResponse:
        return public.GetModelResponse(
            model=self._model.model_id,
            aliases=self._model.aliases,
            max_context=self._serving.max_context,
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.tokenizer.eos_token_ids,
            family=self._model.family,
            model_digest=self._serving.model_digest,
        )


class _Reader:
    """Ends this call when its client reads nothing for ``READ_TIMEOUT_S``.

    A stream is written until the client's window is full; without this, a client that stopped
    reading would hold its place here for ever.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._call = asyncio.current_task()
        self._since_s: float | None = None
        self._look: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def __enter__(self) -> "_Reader":
        self._look = self._loop.call_later(READ_TIMEOUT_S, self._check)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._look is not None
        self._look.cancel()

    def waits(self) -> None:
        """The next message is on its way to the client."""
        self._since_s = self._loop.time()

    def has_read(self) -> None:
        """It fitted the client's window."""
        self._since_s = None

    def _check(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self._since_s is None else self._since_s) + READ_TIMEOUT_S
        if due_s <= now_s:
            self._ending = self._loop.create_task(self._end())
        else:
            self._look = self._loop.call_at(due_s, self._check)

    async def _end(self) -> None:
        """The status waits behind what is unread; the request does not wait for it."""
        assert self._call is not None
        self._loop.call_soon(self._call.cancel)
        with contextlib.suppress(grpc.aio.BaseError):  # how abort returns, or the client has gone
            await _abort(
                self._context, Aborted(f"the client read nothing for {READ_TIMEOUT_S:g} s")
            )


_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_tokens",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "logprobs",
    "n",
    "best_of",
    "prompt_logprobs",
)
"""Fields of SamplingParams that know whether they are set."""


def raw_request(request: public.GenerateRequest) -> RawRequest:
    """A message as the intake takes it.

    Raises:
        InvalidArgument: there is no prompt of any kind, or a guide of none.
    """
    prompt, name = _prompt(request)
    sampling = request.sampling
    numbers: dict[str, Any] = {n: getattr(sampling, n) for n in _NUMBERS if sampling.HasField(n)}
    return RawRequest(
        prompt=prompt,
        prompt_field=name,
        spelling=SPELLING,
        model=request.model,
        sampling=RawSampling(
            **numbers,
            stop=sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            skip_special_tokens=not sampling.HasField("skip_special_tokens")
            or sampling.skip_special_tokens,
            logit_bias=sampling.logit_bias,
            include_stop=sampling.include_stop,
            bad_words=sampling.bad_words,
            beam_search=_beam_search(sampling),
            guide=_guide(sampling),
        ),
        priority=request.priority,
        salt=request.cache_salt,
    )


def _beam_search(sampling: public.SamplingParams) -> RawBeamSearch | None:
    if not sampling.HasField("beam_search"):
        return None
    search = sampling.beam_search
    penalty = search.length_penalty if search.HasField("length_penalty") else None
    return RawBeamSearch(search.width, penalty, search.early_stopping)


def _guide(sampling: public.SamplingParams) -> Guide | None:
    """Raises: InvalidArgument: a guide of no kind."""
    if not sampling.HasField("guided"):
        return None
    guide = parse_guide(sampling.guided)
    if guide is None:
        raise InvalidArgument(SPELLING("guided"), "is empty: say what kind of guide it is")
    return guide


def _prompt(request: public.GenerateRequest | public.TokenizeRequest) -> tuple[Prompt, str]:
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt, "prompt"
        case "prompt_token_ids":
            return request.prompt_token_ids.ids, "prompt_token_ids"
        case "chat":
            return _chat(request.chat), "chat.messages"
    raise InvalidArgument("prompt", "is missing: give prompt, prompt_token_ids or chat")


def _chat(chat: public.ChatMessages) -> Chat:
    """Raises: InvalidArgument: too many parts, or one that is not JSON where it must be."""
    check_number_of_messages(len(chat.messages), "chat.messages")
    check_count(len(chat.tools), MAX_TOOLS, "chat.tools", "tools")
    turns = [_turn(each, f"chat.messages[{i}]") for i, each in enumerate(chat.messages)]
    tools = [
        Tool(each.name, each.description, _object(each.parameters, f"chat.tools[{i}].parameters"))
        for i, each in enumerate(chat.tools)
    ]
    check_tools(tools, "chat.tools[{}].name")
    return Chat(tuple(turns), tuple(tools), continue_final_message=chat.continue_final_message)


def _turn(message: public.ChatMessage, name: str) -> ChatTurn:
    check_count(len(message.tool_calls), MAX_CALLS, f"{name}.tool_calls", "calls")
    calls = [
        ToolCall(each.id, each.name, _object(each.arguments, f"{name}.tool_calls[{i}].arguments"))
        for i, each in enumerate(message.tool_calls)
    ]
    return ChatTurn(message.role, message.content, tuple(calls), message.tool_call_id, message.name)


def _object(source: str, name: str) -> Mapping[str, Any]:
    return parse_object(source, name) if source else {}


def _response(request_id: str, client_request_id: str, event: Answer) -> public.GenerateResponse:
    response = public.GenerateResponse(request_id=request_id)
    match event:
        case public.Accepted():
            response.client_request_id = client_request_id
            response.accepted.CopyFrom(event)
        case public.Tokens():
            response.tokens.CopyFrom(event)
        case public.ChoiceFinished():
            response.choice_finished.CopyFrom(event)
        case public.Finished():
            response.finished.CopyFrom(event)
    return response


def _origin(request: public.GenerateRequest, context: Any) -> Origin:
    """For its trace."""
    said = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
    operation = "chat" if request.WhichOneof("input") == "chat" else "text_completion"
    return origin_of(operation, said)


def _deadline(context: Any) -> float | None:
    """The client's deadline, as a time of the running loop."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else asyncio.get_running_loop().time() + remaining_s


async def _abort(context: Any, error: ServiceError) -> NoReturn:
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, ResourceExhausted):
        metadata = ((RETRY_AFTER_KEY, str(int(error.retry_after_s * 1000))),)
    await context.abort(error.codes.grpc, str(error), metadata)
    raise AssertionError("abort raises")
