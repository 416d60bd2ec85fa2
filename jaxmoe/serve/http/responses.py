# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the body of /v1/responses as that of a conversation, as far as one maps onto the other.

    input           a text is a message of the user; items are messages, calls and their outputs
    instructions    a message of the system before them
    tools           functions, described without the level `function`
    text.format     response_format

Fields of the sampling, of vLLM's among them, are those of a conversation.
Nothing is stored: a request brings all its turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmoe.serve.http.asked import Asked, read_chat
from jaxmoe.serve.http.errors import HTTPError, wrong
from jaxmoe.serve.http.fields import BodyFields
from jaxmoe.serve.http.served import Served
from jaxmoe.serve.http.table import honoured_fields, honoured_names

_SAME = tuple(
    name for name in honoured_names("responses") if name in honoured_names("chat/completions")
)
"""Fields that a conversation has too; `tools` and `tool_choice` are written in another way."""
_PARAMS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "verbosity": "text",
    "reasoning_effort": "reasoning",
}
"""Fields of the conversation, and where a request of this route has them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResponseEcho:
    """Fields of a request that its response repeats."""

    instructions: str | None
    """Message of the system."""
    temperature: float
    """Temperature of the sampling."""
    top_p: float
    """Filter of the sampling."""
    max_output_tokens: int | None
    """Tokens of the answer at most, as the request says it."""
    tools: list[Any]
    """Functions."""
    tool_choice: Any
    """Which of them are called."""
    parallel_tool_calls: bool
    """Whether several may be."""


def read_response(body: Any, served: Served) -> tuple[Asked, ResponseEcho]:
    """Return what a body of /v1/responses asks for, and what the response repeats.

    Args:
        body: JSON value.
        served: The model.

    Raises:
        HTTPError: A field is wrong or not computed, or the model has no chat template.
    """
    values = honoured_fields(body, "responses") if isinstance(body, Mapping) else body
    fields = BodyFields(values, honoured_names("responses"))
    instructions = fields.text("instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    chat: dict[str, Any] = {name: fields.any(name) for name in _SAME}
    chat |= {
        "messages": [*messages, *_messages(fields.any("input"))],
        "max_completion_tokens": fields.integer("max_output_tokens", None, 1),
        "tools": _tools(fields.any("tools")),
        "tool_choice": _tool_choice(fields.any("tool_choice")),
        "response_format": _response_format(_member(fields, "text", "format")),
        "verbosity": _member(fields, "text", "verbosity"),
        "reasoning_effort": _member(fields, "reasoning", "effort"),
    }
    try:
        request = read_chat(chat, served)
    except HTTPError as error:
        error.param = _PARAMS.get(error.param or "", error.param)
        raise
    echo = ResponseEcho(
        instructions=instructions or None,
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        max_output_tokens=fields.any("max_output_tokens"),
        tools=fields.any("tools") or [],
        tool_choice=fields.any("tool_choice") or "auto",
        parallel_tool_calls=fields.flag("parallel_tool_calls", True),
    )
    return request, echo


def _member(fields: BodyFields, name: str, member: str) -> Any:
    """Return a member of a field that is an object; None without it."""
    value = fields.any(name)
    if value is not None and not isinstance(value, Mapping):
        raise wrong(name, f" must be an object with {member!r}, found {type(value).__name__}")
    return None if value is None else value.get(member)


def _messages(value: Any) -> list[Any]:
    """Return the messages of an input; calls that follow each other are one message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("input", " must be a text, or a list of items, at least one")
    messages = list[Any]()
    for number, item in enumerate(value):
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if not isinstance(item, Mapping) or kind == "message":
            messages.append(item)
        elif kind == "function_call":
            _add_call(messages, item)
        elif kind == "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": item.get("output"),
                }
            )
        elif kind != "reasoning":  # earlier reasoning is left out, as templates leave it out
            raise wrong(
                "input",
                f"[{number}].type={kind!r} is not supported: message, function_call,"
                " function_call_output and reasoning are",
            )
    return messages


def _add_call(messages: list[Any], item: Mapping[str, Any]) -> None:
    """Add a call to the message of the assistant before it, or to a new one."""
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id", ""), "type": "function", "function": function}
    latest = messages[-1] if messages else None
    if isinstance(latest, Mapping) and latest.get("role") == "assistant":
        calls = latest.get("tool_calls") or []
        if not isinstance(calls, list):
            raise wrong(
                "input",
                f" has a message whose tool_calls={calls!r:.60} are no list: write calls as items"
                " of the type function_call",
            )
        messages[-1] = {**latest, "tool_calls": [*calls, call]}
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _tools(value: Any) -> Any:
    """Return functions as a conversation describes them."""
    if not isinstance(value, list):
        return value
    tools = list[Any]()
    for number, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or kind != "function":
            raise wrong("tools", f"[{number}].type={kind!r} is not supported: function is")
        function = {name: item for name, item in tool.items() if name != "type"}
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(value: Any) -> Any:
    """Return a choice of tools as a conversation describes it."""
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        tools = value.get("tools")
        if isinstance(tools, list):
            tools = [_tool_choice(tool) for tool in tools]
        allowed = {"mode": value.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    if isinstance(value, Mapping) and "name" in value:
        return {"type": value.get("type"), "function": {"name": value["name"]}}
    return value


def _response_format(value: Any) -> Any:
    """Return a format of the text as a conversation describes it."""
    if isinstance(value, Mapping) and value.get("type") == "json_schema":
        members = {name: item for name, item in value.items() if name != "type"}
        return {"type": "json_schema", "json_schema": members}
    return value
