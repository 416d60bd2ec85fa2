# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routes of the endpoint, an ASGI application of starlette.

    POST /v1/completions  /v1/chat/completions      as OpenAI's clients speak to them
    POST /v1/responses                              a conversation, in OpenAI's newer form
    POST /v1/embeddings                             hidden states of texts
    POST /tokenize  /detokenize                     as vLLM answers them
    GET  /v1/models  /v1/models/NAME                what it serves
    GET  /health  /metrics                          readiness, numbers for Prometheus
    GET  /stats  /                                  numbers as JSON, and a page that shows them
    POST routes of `Served.routes`                  what else its engine does, such as /reshard

A client that goes away cancels its answers. While the server drains, /health and new requests get
503. With a key, every route but /health and the page asks for `Authorization: Bearer KEY`; the page
sends the key of its address, `/?key=KEY`. Pages of other origins may ask where
`EndpointConfig.origins` names them; the further routes refuse them otherwise.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from jaxmoe.json_bounds import parse_json
from jaxmoe.optional import require
from jaxmoe.serve.answers import Ended
from jaxmoe.serve.http.answered import AnswerChoice, ChatForm, CompletionForm, Form
from jaxmoe.serve.http.asked import Asked, read_chat, read_completion, read_embedding
from jaxmoe.serve.http.embeddings import embed
from jaxmoe.serve.http.errors import HTTPError
from jaxmoe.serve.http.page import whole_page
from jaxmoe.serve.http.prometheus import prometheus_text
from jaxmoe.serve.http.response_events import ResponseStream
from jaxmoe.serve.http.responses import read_response
from jaxmoe.serve.http.served import Served
from jaxmoe.serve.http.streams import Answers, failure, is_failed
from jaxmoe.serve.http.tokens import detokenize, tokenize

logger = logging.getLogger(__name__)

_JSON = "application/json"
_EVENTS = "text/event-stream"
_UNCACHED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    """Limits and key of an endpoint."""

    max_body: int = 2**20
    """Bytes of a request at most."""
    body_seconds: float = 60.0
    """Seconds until a request has arrived, at most."""
    header_seconds: float = 30.0
    """Seconds until the header of a request has arrived, also of the next one, at most."""
    stalled_seconds: float = 120.0
    """Seconds for which a client may read nothing of an answer."""
    connections: int = 1024
    """Connections that are held at most; fewer where the process may open fewer files."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may ask (CORS), such as http://localhost:3000; * for all."""
    key: str = ""
    """Bearer key that requests must bring; none when empty."""


class Endpoint:
    """The application; call `app` with a server of ASGI."""

    def __init__(self, served: Served, config: EndpointConfig | None = None):
        """Build the routes.

        Args:
            served: The model.
            config: Limits and key; defaults when None.

        Raises:
            MissingPackageError: starlette is not installed.
        """
        applications = require("starlette.applications", "serve")
        routing = require("starlette.routing", "serve")
        middleware = require("starlette.middleware", "serve")
        cors = require("starlette.middleware.cors", "serve")
        self._responses = require("starlette.responses", "serve")
        self._gone = require("starlette.requests", "serve").ClientDisconnect
        self._served, self._config = served, config or EndpointConfig()
        self.is_draining = False
        """Whether new requests are refused because the server is about to end."""

        def route(path: str, answer: Callable[[Any], Any], method: str = "GET") -> Any:
            return routing.Route(path, self._guard(answer), methods=[method])

        self.app: Any = applications.Starlette(
            routes=[
                route("/v1/completions", self._completions, "POST"),
                route("/v1/chat/completions", self._chat, "POST"),
                route("/v1/responses", self._responses_of, "POST"),
                route("/v1/embeddings", self._embeddings, "POST"),
                route("/tokenize", self._tokenize, "POST"),
                route("/detokenize", self._detokenize, "POST"),
                *(route(path, self._further(path), "POST") for path in served.routes),
                route("/v1/models", self._models),
                route("/v1/models/{model:path}", self._model),
                route("/health", self._health),
                route("/metrics", self._metrics),
                route("/stats", self._stats),
                route("/", self._page),
            ],
            middleware=[
                middleware.Middleware(
                    cors.CORSMiddleware,
                    allow_origins=self._config.origins,
                    allow_methods=("GET", "POST"),
                    allow_headers=("*",),
                )
            ]
            if self._config.origins
            else [],
            exception_handlers={404: self._unknown, 405: self._unknown, 500: self._failed},
        )

    @property
    def config(self) -> EndpointConfig:
        """Its limits."""
        return self._config

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, and wait for the answers that have begun.

        Args:
            seconds: Time to wait at most.

        Returns:
            Whether all have ended.
        """
        self.is_draining = True
        return await asyncio.to_thread(self._served.engine.drain, seconds)

    def _guard(self, answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a route that asks for the key and answers errors in their form."""

        async def guard_call(request: Any) -> Any:
            try:
                if answer not in (self._health, self._page):
                    self._check_key(request)
                return await answer(request)
            except HTTPError as error:
                return self._error(error)

        return guard_call

    def _check_key(self, request: Any) -> None:
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        key = self._config.key
        is_bearer = scheme.lower() == "bearer"
        if key and not (is_bearer and hmac.compare_digest(sent.strip().encode(), key.encode())):
            raise HTTPError(
                401,
                "this server needs a key: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )

    async def _completions(self, request: Any) -> Any:
        completion = read_completion(await self._body(request), self._served)
        return await self._answer(request, completion, CompletionForm(self._served, completion))

    async def _chat(self, request: Any) -> Any:
        completion = read_chat(await self._body(request), self._served)
        return await self._answer(request, completion, ChatForm(self._served, completion))

    async def _responses_of(self, request: Any) -> Any:
        """Answer /v1/responses, whole or as a stream of events."""
        completion, echo = read_response(await self._body(request), self._served)
        response = ResponseStream(completion, echo)
        answers = Answers(self._served.engine, completion)
        watch = asyncio.create_task(_cancel_when_gone(request, answers))
        try:
            await answers.begin()
            events = _response_events(answers, response)
            if not completion.is_streamed:
                whole = [event async for event in events][-1]["response"]
        finally:
            watch.cancel()
        if completion.is_streamed:
            body = _named_events(events)
            return self._responses.StreamingResponse(body, media_type=_EVENTS, headers=_UNCACHED)
        if response.error is not None:
            raise response.error
        return self._json(whole)

    async def _embeddings(self, request: Any) -> Any:
        completion = read_embedding(await self._body(request), self._served)
        answers = Answers(self._served.engine, completion)
        watch = asyncio.create_task(_cancel_when_gone(request, answers))
        try:
            await answers.begin()
            return self._json(await embed(answers, completion))
        finally:
            watch.cancel()

    async def _tokenize(self, request: Any) -> Any:
        return self._json(tokenize(await self._body(request), self._served))

    async def _detokenize(self, request: Any) -> Any:
        return self._json(detokenize(await self._body(request), self._served))

    def _check_origin(self, request: Any) -> None:
        """Refuse a web page of another origin, which a browser sends without being asked.

        Raises:
            HTTPError: It is not among the origins that may ask.
        """
        origin = request.headers.get("origin")
        host = request.headers.get("host", "")
        origins = self._config.origins
        if origin and origin.partition("://")[2] != host and not {"*", origin} & {*origins}:
            raise HTTPError(
                403,
                f"a page of {origin} may not change this server: start it with --origins {origin}",
                code="foreign_origin",
            )

    async def _body(self, request: Any) -> Any:
        """Return the JSON value of a body.

        Raises:
            HTTPError: It is too long, too slow or no JSON, or the server is draining.
        """
        if self.is_draining:
            raise HTTPError(503, "the server is about to end", code="draining", retry_after=30)
        most = self._config.max_body
        body = bytearray()
        too_long = HTTPError(
            413, f"the body has more than {most} bytes: send a shorter prompt", code="too_large"
        )
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            raise too_long
        try:
            async with asyncio.timeout(self._config.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise too_long
        except self._gone as error:  # no client reads the answer
            client = request.client
            logger.warning("%s went away while it sent a request", client.host if client else "?")
            raise HTTPError(400, "the client went away", code="gone") from error
        except TimeoutError as error:
            message = (
                f"the body did not arrive within {self._config.body_seconds:g} s: send it again"
            )
            raise HTTPError(408, message, code="too_slow") from error
        try:
            value = parse_json(text := body.decode())
        except ValueError as error:
            raise HTTPError(400, f"the body is not JSON: {error}") from error
        if "\\u" in text:
            _check_characters(value)
        return value

    async def _answer(self, request: Any, completion: Asked, form: Form) -> Any:
        """Submit the request and answer it, whole or as a stream."""
        answers = Answers(self._served.engine, completion)
        choices = [
            AnswerChoice(index=n) for n in range(completion.number * len(completion.prompts))
        ]
        watch = asyncio.create_task(_cancel_when_gone(request, answers))
        try:
            await answers.begin()
            if not completion.is_streamed:
                await _collect(answers, choices, form)
        finally:
            watch.cancel()
        if completion.is_streamed:
            body = _stream(answers, choices, completion, form)
            return self._responses.StreamingResponse(body, media_type=_EVENTS, headers=_UNCACHED)
        return self._json(form.whole(choices))

    def _further(self, path: str) -> Callable[[Any], Any]:
        """Return what answers a route of `Served.routes`."""

        async def answer(request: Any) -> Any:
            self._check_origin(request)
            return self._json(await self._served.routes[path](await self._body(request)))

        return answer

    async def _models(self, request: Any) -> Any:
        del request
        listed = [self._describe(name) for name in self._served.models]
        return self._json({"object": "list", "data": listed})

    async def _model(self, request: Any) -> Any:
        name = request.path_params["model"]
        self._served.adapter_of(name)
        return self._json(self._describe(name))

    def _describe(self, name: str) -> dict[str, Any]:
        """Return the object of a model."""
        served = self._served
        shared = {"object": "model", "created": served.created, "owned_by": "jaxmoe"}
        return {"id": name} | shared | {"max_model_len": served.engine.facts.max_length}

    async def _health(self, request: Any) -> Any:
        del request
        if self.is_draining or self._served.engine.failure:
            message = self._served.engine.failure or "the server is about to end"
            raise HTTPError(503, message, code="draining" if self.is_draining else "engine_error")
        return self._json({"status": "ok"})

    async def _metrics(self, request: Any) -> Any:
        del request
        text, kind = prometheus_text(self._served)
        return self._responses.Response(text, media_type=kind)

    async def _stats(self, request: Any) -> Any:
        del request
        metrics = self._served.engine.metrics
        load = self._served.engine.expert_load
        values = dataclasses.asdict(metrics) | {
            "model": self._served.name,
            "has_chat": self._served.chat is not None,
            "hit_rate": metrics.hit_rate,
            "expert_load": [] if load is None else load.tolist(),
        }
        return self._json(values)

    async def _page(self, request: Any) -> Any:
        del request
        page, policy = whole_page()
        return self._responses.HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def _unknown(self, request: Any, error: Any) -> Any:
        path = request.url.path
        allowed = dict(error.headers or {})
        message = f"{request.method} {path} is not a route of this server"
        if "Allow" in allowed:
            message = f"{path} takes {allowed['Allow']}, not {request.method}"
        http_error = HTTPError(error.status_code, message, code="unknown_route")
        return self._json(http_error.body, http_error.status, headers=allowed)

    async def _failed(self, request: Any, error: Exception) -> Any:
        """Answer what no route expects; the traceback is in the log of the server."""
        del request
        message = f"the server failed at this request ({type(error).__name__}): see its log"
        return self._error(HTTPError(500, message, code="internal_error"))

    def _json(self, value: Any, status: int = 200, **more: Any) -> Any:
        return self._responses.Response(
            json.dumps(value), status_code=status, media_type=_JSON, **more
        )

    def _error(self, error: HTTPError) -> Any:
        return self._json(error.body, error.status, headers=error.headers)


def _check_characters(value: Any) -> None:
    """Refuse the half of a surrogate pair, which JSON can name and no text can hold.

    Raises:
        HTTPError: There is one.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise HTTPError(
            400, f"the body has {half!r} alone, half of a character: send both halves"
        ) from error


async def _cancel_when_gone(request: Any, answers: Answers) -> None:
    """Cancel the answers when the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answers.cancel()


async def _collect(answers: Answers, choices: list[AnswerChoice], form: Form) -> None:
    """Take in all events.

    Raises:
        HTTPError: An answer was refused or cut off, or has failed.
    """
    async for number, event in answers:
        form.take(choices[number], event)
        if isinstance(event, Ended) and is_failed(event):
            answers.cancel()
            raise failure(event)


async def _stream(
    answers: Answers, choices: list[AnswerChoice], completion: Asked, form: Form
) -> AsyncIterator[str]:
    """Yield the events of a stream; a client that goes away ends the answers."""
    try:
        async for number, event in answers:
            choice = choices[number]
            text, tokens = form.take(choice, event)
            if isinstance(event, Ended) and is_failed(event):
                yield _event(failure(event).body)
                return
            for part in form.chunks(choice, text, tokens):
                if completion.has_usage and completion.has_usage_of_parts:
                    part["usage"] = form.usage_so_far(choice)
                yield _event(part)
        if completion.has_usage:
            yield _event(form.usage_chunk(choices))
        yield "data: [DONE]\n\n"
    finally:
        answers.cancel()


async def _response_events(
    answers: Answers, response: ResponseStream
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a response; a client that goes away ends the answer."""
    try:
        for value in response.begin():
            yield value
        async for _, event in answers:
            if isinstance(event, Ended) and is_failed(event):
                yield response.fail(failure(event))
                return
            values = (
                response.finish(event) if isinstance(event, Ended) else response.add(event.text)
            )
            for value in values:
                yield value
    finally:
        answers.cancel()


async def _named_events(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Yield events with their names, as server-sent events have them."""
    async for value in events:
        yield f"event: {value['type']}\n{_event(value)}"


def _event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"
