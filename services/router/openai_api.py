"""The public HTTP face: OpenAI's API, health, readiness.

    1  read      the body, with a limit
    2  parse     ``openai_schemas``, then the intake; one request for each prompt
    3  accept    all are placed, or the response is an error with its status
    4  answer    whole as JSON, or as server-sent events; a failure on the way is an event, too
    5  gone      a client that disconnects, streaming or not, ends its requests at once

Mounted by ``app``.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from services.router.call_reader import CallReader
from services.router.chats import Chat
from services.router.http_server import EventStream, read_body, until_disconnect
from services.router.intake import RawRequest, new_request_id
from services.router.openai_answers import (
    ChatForm,
    CompletionForm,
    Envelope,
    Form,
    Json,
    error_body,
    error_object,
)
from services.router.openai_calls import Calling
from services.router.openai_schemas import BodyType, ChatBody, CompletionBody, parse_body
from services.router.openai_stream import (
    Answers,
    accepted,
    by_choice,
    choices_of,
    merge,
    sse_events,
    without_answer,
)
from services.router.served_model import ServedModel
from services.router.serving import Serving
from services.router.trace import Origin, origin_of
from services.runtime.errors import (
    Aborted,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    to_service_error,
)

REQUEST_ID_HEADER = "x-request-id"
_MAX_ID_CHARACTERS = 128
_UNAVAILABLE_RETRY_S = 1

Body = CompletionBody | ChatBody


class OpenAiApi:
    """Routes and their handlers."""

    def __init__(
        self,
        model: ServedModel,
        serving: Serving,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._serving = serving
        self._clock = clock
        self._created = int(time.time())

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(HTTPException, _no_such_route)
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"])
        app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self.chat_completions, methods=["POST"])
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/ready", self.ready, methods=["GET"])
        return app

    async def models(self) -> Response:
        names = [self._describe(name) for name in self._model.names]
        return JSONResponse({"object": "list", "data": names})

    async def model(self, name: str) -> Response:
        try:
            self._model.check_name(name)
        except NotFound as error:
            return _error_response(error, {})
        return JSONResponse(self._describe(name))

    async def health(self) -> Response:
        """The process lives."""
        return JSONResponse({"status": "alive"})

    async def ready(self) -> Response:
        """A request could be placed now."""
        if self._serving.can_admit:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, status_code=503)

    async def completions(self, request: Request) -> Response:
        return await self._handle(request, CompletionBody)

    async def chat_completions(self, request: Request) -> Response:
        return await self._handle(request, ChatBody)

    async def _handle(self, request: Request, kind: type[BodyType]) -> Response:
        received_s = self._clock()
        headers = {REQUEST_ID_HEADER: _echoed_id(request) or new_request_id()}
        try:
            body = parse_body(kind, await read_body(request))
            raws = body.raw_requests()
            form = self._form(raws[0])
        except ClientDisconnect:
            return _error_response(self._serving.refused(Aborted("the client has gone")), headers)
        except Exception as unexpected:
            return _error_response(self._serving.refused(unexpected), headers)
        echoes_only = isinstance(body, CompletionBody) and body.echoes_only
        operation = "chat" if kind is ChatBody else "text_completion"
        origin = origin_of(operation, request.headers)
        answers = self._answers(raws, received_s, echoes_only, origin)
        try:
            count = len(raws) * max(1, body.n or 1)
            work = self._respond(body, form, answers, count, headers)
            response = await until_disconnect(request.receive, work)
        except BaseException as unexpected:
            await answers.aclose()
            if not isinstance(unexpected, Exception):
                raise
            return _error_response(to_service_error(unexpected), headers)
        if not isinstance(response, EventStream):
            await answers.aclose()
        return response

    def _form(self, raw: RawRequest) -> Form:
        chat = raw.prompt
        if not isinstance(chat, Chat):
            return CompletionForm()
        if not chat.offered:
            return ChatForm()
        style, names = self._model.tool_style, {tool.name for tool in chat.offered}
        return ChatForm(
            Calling(lambda: CallReader(style.spelling, names, chat.most_calls), style.new_call_id)
        )

    async def _respond(
        self, body: Body, form: Form, answers: Answers, count: int, headers: Mapping[str, str]
    ) -> Response:
        """Wait until all requests are accepted; then the whole answer, or the start of a stream."""
        choices, early = await accepted(answers, count)
        envelope = self._envelope(body, form, choices[0].request.request_id)
        if body.stream:
            events = sse_events(form, envelope, choices, early, answers)
            return EventStream(events, headers)
        for choice, event in early:
            choice.take(event)
        async for choice, event in answers:
            choice.take(event)
        return JSONResponse(form.whole(envelope, choices), headers=dict(headers))

    async def _answers(
        self, raws: Sequence[RawRequest], received_s: float, echoes_only: bool, origin: Origin
    ) -> Answers:
        """The events of all requests as they come, each with the choice it belongs to."""
        with self._serving.enter(len(raws)):
            requests = [await self._serving.parse(raw) for raw in raws]
            echoes = [
                self._echo(raw, each.prompt_token_ids)
                for raw, each in zip(raws, requests, strict=True)
            ]
            groups = choices_of(requests, echoes)
            streams = [
                self._serving.answer(request, received_s, origin=origin) for request in requests
            ]
            async with contextlib.aclosing(merge(streams)) as merged:
                async for index, event in merged:
                    for choice, part in by_choice(groups[index], event):
                        yield choice, without_answer(part) if echoes_only else part

    def _echo(self, raw: RawRequest, token_ids: Sequence[int]) -> str | None:
        if not raw.echo:
            return None
        if isinstance(raw.prompt, str):
            return raw.prompt
        spell = self._model.tokenizer.token_bytes
        return b"".join(map(spell, token_ids)).decode("utf-8", "replace")

    def _envelope(self, body: Body, form: Form, request_id: str) -> Envelope:
        digest = self._serving.model_digest
        return Envelope(
            response_id=form.id_prefix + request_id,
            created=int(time.time()),
            model=body.model or self._model.model_id,
            system_fingerprint=f"kvrelay-{digest[:12]}" if digest else None,
            return_token_ids=bool(body.return_token_ids),
            include_usage=body.include_usage,
            spell=self._model.tokenizer.token_bytes,
            prompt_logprobs=body.prompt_logprobs,
        )

    def _describe(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvrelay",
            "root": self._model.model_id,
            "max_model_len": self._serving.max_context,
        }


def _echoed_id(request: Request) -> str:
    """The client's own id, if it can stand in a header."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    usable = given.isascii() and given.isprintable() and len(given) <= _MAX_ID_CHARACTERS
    return given if usable else ""


def _error_response(error: ServiceError, headers: Mapping[str, str]) -> Response:
    every = dict(headers)
    if isinstance(error, ResourceExhausted):
        every["retry-after"] = str(math.ceil(error.retry_after_s))
    elif isinstance(error, Unavailable):
        every["retry-after"] = str(_UNAVAILABLE_RETRY_S)
    return JSONResponse(error_object(error), status_code=error.codes.http, headers=every)


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = error_body(message, "invalid_request_error", None, "not_found")
    return JSONResponse(body, status_code=error.status_code, headers=dict(error.headers or {}))
