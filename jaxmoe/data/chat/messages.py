# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the messages of a conversation from JSON values, and refuses what is none."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmoe.configs import closest
from jaxmoe.data.batch import DataError
from jaxmoe.json_bounds import parse_json

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
class ToolCall:
    """A call of a function, which an answer asks for."""

    id: str
    """Name of the call, by which a message of the role `tool` answers it."""
    name: str
    """Name of the function."""
    arguments: str
    """JSON object of the arguments by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """One of `ROLES`."""
    content: str
    calls: tuple[ToolCall, ...] = ()
    """Calls of functions, of an answer."""
    call_id: str = ""
    """Call that a message of the role `tool` answers; empty where it names none."""
    name: str = ""
    """Name of the speaker or of the function; empty without one."""
    reasoning: str = ""
    """Thoughts before the content of an answer; empty without any."""

    def further_texts(self) -> Iterator[tuple[str, str]]:
        """Yield path and text of what a template may write beside the content."""
        for number, call in enumerate(self.calls):
            path = f"['tool_calls'][{number}]"
            yield f"{path}['id']", call.id
            yield f"{path}['function']['name']", call.name
            yield f"{path}['function']['arguments']", call.arguments
        yield "['tool_call_id']", self.call_id
        yield "['name']", self.name
        yield "['reasoning_content']", self.reasoning


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


def read_messages(
    value: Any, name: str = "messages", *, reads_calls: bool = False
) -> tuple[Message, ...]:
    """Return messages of JSON values.

    Args:
        value: List of objects with `role` and `content`: a text, or a list of parts
            `{"type": "text", "text": ...}`.
        name: Field of the list, for messages.
        reads_calls: Whether calls of tools, the ids of their answers, names and reasoning are
            read too; without, a message that calls a tool is refused.

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
    return tuple(
        _message(item, f"{name}[{number}]", reads_calls) for number, item in enumerate(value)
    )


def as_json(messages: Sequence[Message]) -> str:
    """Return roles and contents as JSON, the same for equal conversations."""
    return json.dumps([[message.role, message.content] for message in messages])


def _message(value: Any, where: str, reads_calls: bool) -> Message:
    if not isinstance(value, dict):
        raise ConversationError(
            f"{where} must be an object with 'role' and 'content', found {type(value).__name__}"
        )
    fields: dict[str, Any] = _further_fields(value, where) if reads_calls else {}
    if fields.get("calls") and value.get("content") is None:
        value = value | {"content": ""}
    calls = value.get("function_call") or (not reads_calls and value.get("tool_calls"))
    if calls:
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
    return Message(role, _content(value["content"], f"{where}['content']"), **fields)


def _further_fields(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Return what a message has beside role and content, by the fields of `Message`."""
    names = {"tool_call_id": "call_id", "name": "name", "reasoning_content": "reasoning"}
    fields: dict[str, Any] = {
        field: _text(value[name], f"{where}['{name}']")
        for name, field in names.items()
        if value.get(name) is not None
    }
    if value.get("tool_calls") is None:
        return fields
    place = f"{where}['tool_calls']"
    if value.get("role") != ANSWER:
        raise ConversationError(f"{place} is a field of messages of the role {ANSWER!r} alone")
    if not isinstance(value["tool_calls"], list):
        kind = type(value["tool_calls"]).__name__
        raise ConversationError(f"{place} must be a list of calls, found {kind}")
    calls = [_tool_call(item, f"{place}[{n}]") for n, item in enumerate(value["tool_calls"])]
    return fields | {"calls": tuple(calls)}


def _tool_call(value: Any, where: str) -> ToolCall:
    """Return a call `{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}`.

    The arguments are the text of a JSON object, or the object.
    """
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise ConversationError(
            f"{where} must be an object with 'id', 'type': 'function' and 'function', which has"
            f" 'name' and 'arguments'; found {repr(value)[:60]}"
        )
    name = _text(function.get("name"), f"{where}['function']['name']")
    place = f"{where}['function']['arguments']"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}")
        except ValueError as error:
            raise ConversationError(f"{place} is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ConversationError(
            f"{place} must be a JSON object, or its text, found {repr(arguments)[:40]}"
        )
    identifier = _text(value.get("id", ""), f"{where}['id']")
    return ToolCall(identifier, name, json.dumps(arguments, ensure_ascii=False))


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
