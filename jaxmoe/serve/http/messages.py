# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Message of an answer to a conversation: reasoning, content and calls, whole or as it grows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxmoe.serve.http.reasoning import ReasoningParserConfig
from jaxmoe.serve.http.tools.base import SpelledStream, ToolParserConfig
from jaxmoe.serve.http.tools.call import MessagePart


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallsFormat:
    """How the answers to one request call functions."""

    parser: ToolParserConfig
    """How calls are written."""
    names: tuple[str, ...]
    """Functions that may be called."""
    is_parallel: bool = True
    """Whether there may be several calls."""
    is_spelled: bool = False
    """Whether a grammar makes the answer calls and nothing else."""

    def stream(self) -> Any:
        """Return what reads one answer part by part."""
        if self.is_spelled:
            return SpelledStream(self.parser, self.names)
        return self.parser.stream(self.names, is_parallel=self.is_parallel)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MessageFormat:
    """How the answers to one request become messages."""

    reasoning: ReasoningParserConfig
    """How reasoning is told from content."""
    has_reasoning: bool = True
    """Whether the reasoning is sent."""
    calls: CallsFormat | None = None
    """How calls are told from content; None where there are none."""
    prompt: str = ""
    """End of the text of the prompt."""


class MessageStream:
    """The message of one answer as it grows."""

    def __init__(self, form: MessageFormat):
        """Begin an answer.

        Args:
            form: How it becomes a message.
        """
        self._has_reasoning = form.has_reasoning
        self._reasoning = form.reasoning.stream(form.prompt)
        self._calls = None if form.calls is None else form.calls.stream()
        self.parts: list[MessagePart] = []
        """All parts so far."""
        self.has_content = False
        """Whether content has begun."""
        self.has_calls = False
        """Whether a call has begun."""

    def add(self, text: str, *, is_last: bool) -> list[MessagePart]:
        """Return what a part of the answer adds.

        Args:
            text: The part.
            is_last: Whether the answer ends with it.
        """
        pieces = self._reasoning.add(text)
        if is_last:
            pieces += self._reasoning.finish()
        parts = list[MessagePart]()
        for kind, piece in pieces:
            if kind == "reasoning":
                parts += [MessagePart(reasoning=piece)] if self._has_reasoning else []
            elif self._calls is None:
                parts.append(MessagePart(content=piece))
            else:
                parts += self._calls.add(piece)
        if is_last and self._calls is not None:
            parts += self._calls.finish()
        self.parts += parts
        self.has_content = self.has_content or any(part.content for part in parts)
        self.has_calls = self.has_calls or any(part.call is not None for part in parts)
        return parts

    def num_reasoning(self, lengths: Iterable[int], last: int) -> int:
        """Return the tokens of which a character is in the reasoning, whether it is sent or not.

        Args:
            lengths: Characters that came with each token of the answer: those of a character, or of
                a text that was held back, with the last of its tokens.
            last: Characters that came with the end of the answer.
        """
        first_place, last_place = self._reasoning.places
        place = 0
        number = 0
        num_open = 0
        for length, count in (*((length, 1) for length in lengths), (last, 0)):
            num_open += count
            if length:
                is_inside = place < last_place and place + length > first_place
                number += num_open if is_inside else 0
                num_open = 0
                place += length
        return number


def whole_message(parts: Iterable[MessagePart]) -> dict[str, Any]:
    """Return the fields of a message: content, reasoning_content and tool_calls.

    Args:
        parts: All parts of the answer.
    """
    content = ""
    reasoning = ""
    calls = list[dict[str, Any]]()
    for part in parts:
        content += part.content
        reasoning += part.reasoning
        if part.call is None:
            continue
        if part.call == len(calls):
            calls.append(_call(part))
        else:
            calls[part.call]["function"]["arguments"] += part.arguments
    message: dict[str, Any] = {"content": content or (None if reasoning or calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def with_contents(messages: Any) -> Any:
    """Return the messages of a request, with a text where the content of an answer is null.

    An answer of calls or of reasoning alone has no content, and comes back with the next request.

    Args:
        messages: JSON value of the field, of any type.
    """
    if not isinstance(messages, list):
        return messages
    return [
        {**message, "content": ""}
        if isinstance(message, Mapping)
        and message.get("role") == "assistant"
        and message.get("content", "") is None
        else message
        for message in messages
    ]


def delta(part: MessagePart) -> dict[str, Any]:
    """Return the fields that a part adds to the message of a stream.

    Args:
        part: The part.
    """
    if part.reasoning:
        return {"reasoning_content": part.reasoning}
    if part.call is None:
        return {"content": part.content}
    if part.name:
        return {"tool_calls": [{"index": part.call} | _call(part)]}
    return {"tool_calls": [{"index": part.call, "function": {"arguments": part.arguments}}]}


def _call(part: MessagePart) -> dict[str, Any]:
    """Return the object of a call, from its first part."""
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": part.id, "type": "function", "function": function}
