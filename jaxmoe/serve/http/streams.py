# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Brings the answers of an engine's thread into the event loop of the endpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from jaxmoe.serve.answers import AnswerEvent, Ended
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.http.asked import Asked
from jaxmoe.serve.http.errors import HTTPError
from jaxmoe.serve.requests import RefusalCode
from jaxmoe.serve.streams import AnswerStream

_REFUSALS: Mapping[RefusalCode, tuple[int, int | None]] = {
    "queue_full": (429, 1),
    "context_length_exceeded": (400, None),
    "duplicate_id": (400, None),
    "draining": (503, 30),
    "engine_error": (503, None),
}
"""Status of each refusal, and the seconds after which the same request may succeed."""


class Answers:
    """Events of all answers to one request, in the order in which they come."""

    def __init__(self, engine: Engine, completion: Asked):
        """Submit the request.

        Args:
            engine: Engine of the model.
            completion: The request.

        Raises:
            HTTPError: The engine cannot compute it.
        """
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, AnswerEvent]] = asyncio.Queue()
        self._streams: list[AnswerStream] = []
        self._first: tuple[int, AnswerEvent] | None = None
        self._open = completion.number * len(completion.prompts)
        if self._open > engine.most_waiting:
            raise HTTPError(
                400,
                f"{len(completion.prompts)} prompts with n={completion.number} are {self._open}"
                f" answers, and at most {engine.most_waiting} may wait at this server: ask for"
                " fewer, or start it with --engine.max_waiting",
                param="n",
            )
        try:
            self._streams = engine.submit_all(
                completion.prompts,
                completion.sampling,
                completion.number,
                stop=completion.stop,
                on_event=self._put,
                **completion.given,
            )
        except ValueError as error:
            raise HTTPError(400, str(error)) from error

    async def begin(self) -> None:
        """Wait for the first event.

        Raises:
            HTTPError: The request is refused or cut off, or the step has failed.
        """
        self._first = await self._events.get()
        event = self._first[1]
        if isinstance(event, Ended) and is_failed(event):
            self.cancel()
            raise failure(event)

    async def __aiter__(self) -> AsyncIterator[tuple[int, AnswerEvent]]:
        while self._open:
            number, event = self._first or await self._events.get()
            self._first = None
            self._open -= isinstance(event, Ended)
            yield number, event

    def cancel(self) -> None:
        """End all answers early."""
        for stream in self._streams:
            stream.cancel()

    def _put(self, number: int, event: AnswerEvent) -> None:
        """Pass an event on; called in the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))


def failure(ending: Ended) -> HTTPError:
    """Return the error of an answer that is not whole.

    Args:
        ending: Its end; `is_failed` holds.
    """
    if ending.reason == "cancelled":
        message = "the server is about to end, and has cut the answer off: try again later"
        return HTTPError(503, message, code="draining", retry_after=30)
    if ending.code is None:
        return HTTPError(500, ending.message, code="engine_error")
    status, retry_after = _REFUSALS[ending.code]
    return HTTPError(status, ending.message, code=ending.code, retry_after=retry_after)


def is_failed(ending: Ended) -> bool:
    """Return whether an answer is not whole.

    An answer is cancelled at the end of the server, or where no client reads it any more.

    Args:
        ending: Its end.
    """
    return ending.reason in ("refused", "error", "cancelled")
