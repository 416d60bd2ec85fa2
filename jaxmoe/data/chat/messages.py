# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads conversations from JSON values in the usual forms, and refuses what is none.

    OpenAI, TRL     {"messages": [{"role": "user", "content": ...}, ...]}
    TRL             {"prompt": ..., "completion": ...}: texts, or lists of messages
    ShareGPT        {"conversations": [{"from": "human", "value": ...}, ...]}
    Alpaca          {"instruction": ..., "input": ..., "output": ...}

Beside them `tools` lists functions that answers may call, and `system` is a message of the system
(ShareGPT, Alpaca). An answer with `"weight": 0` is not trained, as at OpenAI; nor are answers in a
prompt.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxmoe.configs import closest
from jaxmoe.data.batch import DataError
from jaxmoe.data.reading.formats import CONVERSATIONS
from jaxmoe.json_bounds import parse_json

ROLES = ("system", "user", "assistant", "tool")
"""Roles of messages; tokens of `assistant` are answers."""
ANSWER = "assistant"
FIELDS = frozenset(field for form in CONVERSATIONS for field in form) | {
    *("input", "system", "history", "tools"),
    *("image", "images", "audio", "audios", "video", "videos"),
}
"""Fields of a record that are read."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message by which templates and data name the thoughts before an answer."""
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")
_MOST_MESSAGES = 1000
_MEANT = {"human": "user", "gpt": ANSWER, "bot": ANSWER, "model": ANSWER, "function": "tool"}
_SPEAKERS = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), ANSWER),
    **dict.fromkeys(("observation", "function_response", "function"), "tool"),
}
"""Role of each `from` of ShareGPT."""
_CALLED = "function_call"
"""Speaker of ShareGPT whose text is the JSON of a call."""
_NEITHER = (
    "a conversation has 'messages' (role, content), 'conversations' (from, value), 'prompt' and"
    " 'completion', or 'instruction' and 'output'"
)


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
    is_trained: bool = True
    """Whether an answer is trained on."""

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


class Conversation(NamedTuple):
    """Messages of a record, and the functions that its answers may call."""

    messages: tuple[Message, ...]
    tools: str | None = None
    """JSON list of the functions; None without any."""


def is_conversation(names: Collection[str]) -> bool:
    """Return whether records with such fields are conversations.

    Args:
        names: Names of fields or columns.
    """
    return any(set(form) <= set(names) for form in CONVERSATIONS)


def read_conversation(value: Any) -> Conversation:
    """Return the conversation of a record, in one of the forms of this file.

    Args:
        value: Object with the fields of one of `CONVERSATIONS`. Fields that are not in `FIELDS`
            are not read.

    Raises:
        ConversationError: Fields are missing, or of another type; a message has no text or an
            unknown role; the record has images.
    """
    if not isinstance(value, dict):
        raise ConversationError(f"expected an object, found {type(value).__name__}: {_NEITHER}")
    fields = {name: item for name, item in value.items() if item is not None}
    if media := next((name for name in _MEDIA if fields.get(name)), None):
        raise ConversationError(
            f"has a field {media!r}, and models here read text alone: leave such records out, or"
            " remove the field if the text makes sense without"
        )
    if {"chosen", "rejected"} <= fields.keys() and "completion" not in fields:
        name = "completion" if "prompt" in fields else "messages"
        raise ConversationError(
            "has fields 'chosen' and 'rejected'. These are pairs of preferences: rename 'chosen' to"
            f" {name!r}, to train on its answers"
        )
    names_with_value = {name for name, item in fields.items() if item != ""}
    form = next((form for form in CONVERSATIONS if set(form) & names_with_value), None)
    if form is None:
        names = ", ".join(map(repr, value)) or "none"
        raise ConversationError(f"has fields {names}: {_NEITHER}. Rename its fields")
    if form == ("prompt", "completion"):
        messages = _prompt_and_completion(fields.get("prompt"), fields.get("completion"))
    elif form == ("instruction", "output"):
        messages = _instruction(fields)
    else:
        messages = _list_of_messages(fields[form[0]], form[0])
    system = fields.get("system")
    if system and messages[0].role != "system":
        messages = (Message("system", _text(system, "system")), *messages)
    return Conversation(messages, _tools(fields.get("tools")))


def _list_of_messages(value: Any, name: str) -> tuple[Message, ...]:
    """Return the messages of a list, or of its JSON, as tables hold it."""
    is_json = isinstance(value, str) and value.lstrip().startswith("[")
    return read_messages(_parse_field(value, name) if is_json else value, name)


def _prompt_and_completion(prompt: Any, completion: Any) -> tuple[Message, ...]:
    """Return a prompt, of which no answer is trained, and its completion: texts or messages."""
    if isinstance(prompt, list):
        before = read_messages(prompt, "prompt")
    else:
        before = (Message("user", _text(prompt, "prompt")),)
    if isinstance(completion, list):
        after = read_messages(completion, "completion")
    else:
        after = (Message(ANSWER, _text(completion, "completion")),)
    untrained = (
        dataclasses.replace(message, is_trained=False) if message.role == ANSWER else message
        for message in before
    )
    return (*untrained, *after)


def _instruction(fields: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the messages of an instruction, its input on the next line, and its output."""
    messages = []
    history = fields.get("history") or ()
    for number, pair in enumerate(history if isinstance(history, Sequence) else [history]):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ConversationError(
                f"history[{number}] must be a list of an instruction and its output, found"
                f" {repr(pair)[:40]}"
            )
        messages.append(Message("user", _text(pair[0], f"history[{number}][0]")))
        messages.append(Message(ANSWER, _text(pair[1], f"history[{number}][1]")))
    question = _text(fields.get("instruction"), "instruction")
    if source := _text(fields.get("input", ""), "input"):
        question = f"{question}\n{source}"
    answer = Message(ANSWER, _text(fields.get("output"), "output"))
    return (*messages, Message("user", question), answer)


def _tools(value: Any) -> str | None:
    """Return the JSON list of functions; None without any."""
    tools = _parse_field(value, "tools") if isinstance(value, str) and value.strip() else value
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, dict) for tool in tools):
        raise ConversationError(
            f"tools must be a list of objects, or its JSON, found {repr(value)[:40]}"
        )
    functions = [
        {"type": "function", "function": tool}
        if "name" in tool and "function" not in tool
        else tool
        for tool in tools
    ]
    return json.dumps(functions, ensure_ascii=False)


def read_messages(value: Any, name: str = "messages") -> tuple[Message, ...]:
    """Return messages of JSON values.

    Args:
        value: List of objects with `role` and `content`, or `from` and `value`. A content is a
            text, or a list of parts `{"type": "text", "text": ...}`. Calls of tools, the ids of
            their answers, names and reasoning are read too.
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


def _parse_field(text: str, where: str) -> Any:
    """Return the value of a field that holds JSON."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConversationError(f"{where} is no JSON: {error}") from error


def as_json(messages: Sequence[Message]) -> str:
    """Return roles, contents and calls as JSON, the same for equal conversations."""
    rows = (
        [message.role, message.content, *(text for _, text in message.further_texts() if text)]
        for message in messages
    )
    return json.dumps(list(rows))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise ConversationError(
            f"{where} must be an object with 'role' and 'content', found {type(value).__name__}"
        )
    if value.get("function_call"):
        raise ConversationError(
            f"{where} calls a tool by function_call ({repr(value['function_call'])[:40]}): write it"
            " as tool_calls"
        )
    if value.get("from") is not None and value.get("role") is None:
        return _turn(value, where)
    fields = _further_fields(value, where)
    if fields.get("calls") and value.get("content") is None:
        value = value | {"content": ""}
    for name in ("role", "content"):
        if name not in value:
            names = ", ".join(map(repr, value)) or "none"
            raise ConversationError(f"{where} has no field {name!r}; it has {names}")
    role = "system" if value["role"] == "developer" else value["role"]
    if not isinstance(role, str) or role not in ROLES:
        meant = _MEANT.get(role) if isinstance(role, str) else None
        hint = f" (write {meant!r})" if meant else closest(role, ROLES) if role == str(role) else ""
        raise ConversationError(
            f"{where} has the role {repr(role)[:40]}{hint}: choose one of {', '.join(ROLES)}"
        )
    return Message(role, _content(value["content"], f"{where}['content']"), **fields)


def _turn(value: dict[str, Any], where: str) -> Message:
    """Return a message `{"from": ..., "value": ...}` of ShareGPT."""
    speaker = value["from"]
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        hint = closest(speaker, _SPEAKERS) if isinstance(speaker, str) else ""
        raise ConversationError(
            f"{where} is from {repr(speaker)[:40]}{hint}: choose one of {', '.join(_SPEAKERS)}"
        )
    text = _content(value.get("value"), f"{where}['value']")
    fields = _further_fields(value | {"role": _SPEAKERS[speaker]}, where)
    if speaker != _CALLED:
        return Message(_SPEAKERS[speaker], text, **fields)
    calls = _parse_field(text, f"{where}['value']")
    fields["calls"] = tuple(
        _tool_call({"function": call}, f"{where}['value']")
        for call in (calls if isinstance(calls, list) else [calls])
    )
    return Message(ANSWER, "", **fields)


def _further_fields(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Return what a message has beside role and content, by the fields of `Message`."""
    names = {
        **{"tool_call_id": "call_id", "name": "name"},
        **dict.fromkeys(reversed(REASONING_FIELDS), "reasoning"),
    }
    fields: dict[str, Any] = {
        field: _text(value[name], f"{where}['{name}']")
        for name, field in names.items()
        if value.get(name) is not None
    }
    if (weight := value.get("weight")) is not None:
        if weight not in (0, 1):
            raise ConversationError(f"{where}['weight'] must be 0 or 1, found {repr(weight)[:40]}")
        fields["is_trained"] = weight == 1
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
        arguments = _parse_field(arguments or "{}", place)
    if not isinstance(arguments, dict):
        raise ConversationError(
            f"{place} must be a JSON object, or its text, found {repr(arguments)[:40]}"
        )
    identifier = _text(value.get("id") or "", f"{where}['id']")
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
