# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers of /v1/responses: the object, and the events of its stream.

A response is a list of items, one after the other: reasoning, a message, and a call of a function
each. An item begins with an event, grows by deltas and ends with its whole content:

    response.created  response.in_progress
    response.output_item.added  response.content_part.added  response.output_text.delta ...
    response.output_text.done  response.content_part.done  response.output_item.done
    response.completed, response.incomplete or response.failed, with the whole object
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator
from typing import Any

from jaxmoe.serve.answers import Ended
from jaxmoe.serve.http.asked import Asked
from jaxmoe.serve.http.errors import HTTPError
from jaxmoe.serve.http.messages import MessageStream
from jaxmoe.serve.http.responses import ResponseEcho
from jaxmoe.serve.http.tools.call import MessagePart

Event = dict[str, Any]
_NAMES = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
"""What the events of the text of an item are called."""


class ResponseStream:
    """One response as it grows; each method returns the events that it adds."""

    def __init__(self, request: Asked, echo: ResponseEcho):
        """Begin a response.

        Args:
            request: The request.
            echo: What the response repeats of it.
        """
        assert request.message is not None  # `read_chat` has made it
        self._message = MessageStream(request.message)
        self.error: HTTPError | None = None
        """Why the answer has failed; None while it has not."""
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        """Characters of each token."""
        self._texts: list[str] = []
        """Parts of the text of the item that grows."""
        self._call: int | None = None
        self._is_open = False
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": request.model,
            "error": None,
            "incomplete_details": None,
            "metadata": {},
            "previous_response_id": None,
            "store": False,
        } | dataclasses.asdict(echo)

    def begin(self) -> list[Event]:
        """Return the events before the first item."""
        response = self._object("in_progress", None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def add(self, text: str) -> list[Event]:
        """Return the events of a token of the answer.

        Args:
            text: Text that comes with it.
        """
        self._lengths.append(len(text))
        return self._events(self._message.add(text, is_last=False))

    def finish(self, ending: Ended) -> list[Event]:
        """Return the events of the end of the answer; the last one has the whole object.

        Args:
            ending: The end, whose text was not added.
        """
        events = self._events(self._message.add(ending.text, is_last=True))
        is_whole = ending.reason == "stop"
        events += self._close("completed" if is_whole else "incomplete")
        kind = "completed" if is_whole else "incomplete"
        return [*events, self._event(f"response.{kind}", response=self._object(kind, ending))]

    def fail(self, error: HTTPError) -> Event:
        """Return the event of an answer that has failed.

        Args:
            error: Why.
        """
        self.error = error
        response = self._object("failed", None)
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    def _object(self, status: str, ending: Ended | None) -> dict[str, Any]:
        """Return the response."""
        usage = None
        details = None
        if ending is not None:
            num_reasoning = self._message.num_reasoning(self._lengths, len(ending.text))
            usage = {
                "input_tokens": ending.num_prompt,
                "input_tokens_details": {
                    "cached_tokens": ending.num_cached,
                    "cache_write_tokens": 0,
                },
                "output_tokens": ending.num_generated,
                "output_tokens_details": {"reasoning_tokens": num_reasoning},
                "total_tokens": ending.num_prompt + ending.num_generated,
            }
            if status == "incomplete" and ending.reason == "length":
                details = {"reason": "max_output_tokens"}
        variable = {"status": status, "usage": usage, "incomplete_details": details}
        return self._head | {"output": list(self._items)} | variable

    def _events(self, parts: list[MessagePart]) -> list[Event]:
        """Return the events of parts of the message."""
        events = list[Event]()
        for part in parts:
            kind = "message" if part.call is None else "function_call"
            kind = "reasoning" if part.reasoning else kind
            is_same = self._is_open and self._items[-1]["type"] == kind and self._call == part.call
            if not is_same:
                events += self._close("completed")
                events += self._open(kind, part)
            if text := part.content or part.reasoning or part.arguments:
                self._texts.append(text)
                events.append(self._text_event("delta", delta=text))
        return events

    def _open(self, kind: str, part: MessagePart) -> Iterator[Event]:
        """Yield the events of the begin of an item."""
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind}
        item["status"] = "in_progress"
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"call_id": part.id, "name": part.name, "arguments": ""}
        self._items.append(item)
        self._texts = []
        self._call = part.call
        self._is_open = True
        yield self._item_event("added")
        if kind != "function_call":
            yield self._part_event("added")

    def _close(self, status: str) -> Iterator[Event]:
        """Yield the events of the end of the item that grows, if there is one."""
        if not self._is_open:
            return
        item = self._items[-1]
        text = "".join(self._texts)
        is_call = item["type"] == "function_call"
        if is_call:
            yield self._text_event("done", arguments=text, name=item["name"])
        else:
            yield self._text_event("done", text=text)
            yield self._part_event("done")
        content = {"arguments": text} if is_call else {"content": [self._part()]}
        self._items[-1] = item | content | {"status": status}
        self._is_open = False
        yield self._item_event("done")

    def _part(self) -> dict[str, Any]:
        """Return the text of the item that grows."""
        text = "".join(self._texts)
        if self._items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _part_event(self, step: str) -> Event:
        fields = {"item_id": self._items[-1]["id"], "content_index": 0, "part": self._part()}
        return self._event(
            f"response.content_part.{step}", output_index=len(self._items) - 1, **fields
        )

    def _item_event(self, step: str) -> Event:
        return self._event(
            f"response.output_item.{step}",
            output_index=len(self._items) - 1,
            item=self._items[-1],
        )

    def _text_event(self, step: str, **fields: Any) -> Event:
        item = self._items[-1]
        if item["type"] != "function_call":
            fields["content_index"] = 0
        if item["type"] == "message":
            fields["logprobs"] = []
        name = f"{_NAMES[item['type']]}.{step}"
        return self._event(name, item_id=item["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        """Return an event with its number."""
        number = self._number
        self._number += 1
        return {"type": kind, "sequence_number": number} | fields
