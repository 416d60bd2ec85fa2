# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the messages of a conversation from JSON values, and refuses what is none."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxmoe.configs import closest
from jaxmoe.data.batch import DataError

ROLES = ("system", "user", "assistant", "tool")
"""Roles of messages; tokens of `assistant` are answers."""
ANSWER = "assistant"
COLUMNS = (("messages",), ("prompt", "completion"))
"""Fields of a record: one of these sets, the first that is there."""
_MOST_MESSAGES = 1000
_MEANT = {"human": "user", "gpt": ANSWER, "bot": ANSWER, "model": ANSWER, "developer": "system"}
_NEITHER = "a conversation has a field 'messages', or fields 'prompt' and 'completion'"


class ConversationError(DataError):
    """A conversation that cannot be used, or not with this template."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """One of `ROLES`."""
    content: str


def read_conversation(value: Any) -> tuple[Message, ...]:
    """Return the messages of a record.

    Args:
        value: `{"messages": [{"role": ..., "content": ...}]}`, or `{"prompt": ..., "completion":
            ...}`, which is a message of the user and its answer. Other fields are not read.

    Raises:
        ConversationError: Fields are missing, or of another type; a message has no text, an unknown
            role, or calls a tool.
    """
    if not isinstance(value, dict):
        raise ConversationError(f"expected an object, found {type(value).__name__}: {_NEITHER}")
    if value.get("messages") is None and not {"prompt", "completion"} & value.keys():
        names = ", ".join(map(repr, value)) or "none"
        raise ConversationError(f"has fields {names}: {_NEITHER}. Rename its fields")
    if value.get("messages") is None:
        prompt, completion = (_text(value.get(name), name) for name in ("prompt", "completion"))
        return Message("user", prompt), Message(ANSWER, completion)
    return read_messages(value["messages"])


def read_messages(value: Any, name: str = "messages") -> tuple[Message, ...]:
    """Return messages of JSON values.

    Args:
        value: List of objects with `role` and `content`: a text, or a list of parts
            `{"type": "text", "text": ...}`.
        name: Field of the list, for messages.

    Raises:
        ConversationError: The value is no list of messages.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConversationError(
            f"field {name!r} must be a list of objects with 'role' and 'content', found"
            f" {type(value).__name__}"
        )
    if not value:
        raise ConversationError(f"field {name!r} is empty: give it a message, or remove the record")
    if len(value) > _MOST_MESSAGES:
        raise ConversationError(
            f"field {name!r} has {len(value):,} messages, at most {_MOST_MESSAGES:,} are read:"
            " write several conversations"
        )
    return tuple(_message(item, f"{name}[{number}]") for number, item in enumerate(value))


def as_json(messages: Sequence[Message]) -> str:
    """Return roles and contents as JSON, the same for equal conversations."""
    return json.dumps([[message.role, message.content] for message in messages])


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise ConversationError(
            f"{where} must be an object with 'role' and 'content', found {type(value).__name__}"
        )
    if calls := value.get("tool_calls") or value.get("function_call"):
        raise ConversationError(
            f"{where} calls a tool ({repr(calls)[:40]}), which no template here writes: put the"
            " text of the call into 'content'"
        )
    for name in ("role", "content"):
        if name not in value:
            names = ", ".join(map(repr, value)) or "none"
            raise ConversationError(f"{where} has no field {name!r}; it has {names}")
    role = value["role"]
    if not isinstance(role, str) or role not in ROLES:
        meant = _MEANT.get(role) if isinstance(role, str) else None
        hint = f" (write {meant!r})" if meant else closest(role, ROLES) if role == str(role) else ""
        raise ConversationError(
            f"{where} has the role {repr(role)[:40]}{hint}: choose one of {', '.join(ROLES)}"
        )
    return Message(role, _content(value["content"], f"{where}['content']"))


def _content(value: Any, where: str) -> str:
    """Return the text of a content, which is a text or a list of parts, joined by line ends."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return _text(value, where)
    if not value:
        raise ConversationError(f"{where} is an empty list: give it a part of text, or a text")
    texts = []
    for number, part in enumerate(value):
        place = f"{where}[{number}]"
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in ("text", "input_text", "output_text"):
            kind_text = f"type {repr(kind)[:40]}" if isinstance(part, dict) else type(part).__name__
            raise ConversationError(
                f"{place} must be a part of text, {{'type': 'text', 'text': ...}}, found"
                f" {kind_text}:"
                " models here read text alone"
            )
        texts.append(_text(part.get("text"), f"{place}['text']"))
    return "\n".join(texts)


def _text(value: Any, where: str) -> str:
    """Return a text; raise a ConversationError for other values."""
    if not isinstance(value, str):
        description = "nothing" if value is None else f"{type(value).__name__} {repr(value)[:40]}"
        raise ConversationError(f"{where} must be a text, found {description}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConversationError(
            f"{where} has half a surrogate pair at character {error.start}: it is no Unicode text"
        ) from error
    return value
