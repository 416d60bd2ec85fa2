# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Stream of one request: the engine publishes events, a client reads them."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

from jaxmoe.generation.text_stream import TextStream
from jaxmoe.serve.answers import AnswerEvent, Ended, Generated
from jaxmoe.serve.requests import End, Request, Token


class AnswerStream:
    """Events of one request, to be read once: iterate, or pass `on_event` to `submit`."""

    def __init__(
        self,
        request: Request,
        text: TextStream,
        on_event: Callable[[AnswerEvent], None] | None,
        cancel: Callable[[int], None],
    ):
        self.request = request
        self._text = text
        self._cancel = cancel
        self._events: queue.SimpleQueue[AnswerEvent] = queue.SimpleQueue()
        self._on_event = on_event or self._events.put
        self._submitted = time.monotonic()
        self._first: float | None = None
        self._last: float | None = None
        self._num_generated = 0
        self.num_cached = 0
        """Tokens of the prompt found in the pool."""

    @property
    def id(self) -> int:
        """Number of the request."""
        return self.request.id

    @property
    def has_begun(self) -> bool:
        """Whether there is a token."""
        return self._num_generated > 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._text.is_stopped

    def __iter__(self) -> Iterator[AnswerEvent]:
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, Ended):
                return

    def cancel(self) -> None:
        """End the answer early; its last event follows."""
        self._cancel(self.id)

    def token(self, token: Token) -> bool:
        """Publish a token; return whether its text ends the answer. For the engine alone."""
        self._last = time.monotonic()
        self._first = self._last if self._first is None else self._first
        self._num_generated += 1
        result = token.result
        sampling = self.request.sampling
        is_end = token.result.token in sampling.stop_ids and not sampling.has_stop
        new = "" if is_end else self._text.add(result.token)
        self._on_event(
            Generated(
                index=token.index,
                token=result.token,
                text=new,
                logprob=result.logprob,
                alternatives=result.alternatives,
                prompt=result.prompt,
                experts=result.experts,
                embedding=result.embedding,
            )
        )
        return self._text.is_stopped

    def end(self, end: End) -> Ended:
        """Publish the end, and return it. For the engine alone."""
        last_text = self._text.finish()
        num_later = self._num_generated - 1
        ttft = tpot = None
        if self._first is not None and self._last is not None:
            ttft = self._first - self._submitted
            tpot = (self._last - self._first) / num_later if num_later else None
        is_whole = end.reason in ("stop", "length")
        ending = Ended(
            reason="stop" if is_whole and self._text.is_stopped else end.reason,
            message=end.message,
            code=end.code,
            text=last_text,
            num_prompt=len(self.request.prompt),
            num_cached=self.num_cached,
            num_generated=self._num_generated,
            ttft=ttft,
            tpot=tpot,
        )
        self._on_event(ending)
        return ending
