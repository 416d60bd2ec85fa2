# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the functions that a request offers, and which of them an answer must call."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from jaxmoe.serve.http.errors import HTTPError, wrong
from jaxmoe.serve.http.fields import BodyFields

_MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CHOICES = (
    "none, auto, required, {'type': 'function', 'function': {'name': NAME}}, or {'type':"
    " 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': [...]}}"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """Functions of a request."""

    value: tuple[Mapping[str, Any], ...]
    """The functions, as the request describes them."""
    choice: Literal["none", "auto", "required", "named"]
    """Whether an answer calls them: never, as it likes, always, or one of them once."""
    allowed: tuple[str, ...] = ()
    """Functions that may be called, with `named` one; all of them when empty. The prompt describes
    the others too, so that it stays as it is while the choice changes."""
    is_parallel: bool = True
    """Whether an answer may call several."""

    @property
    def is_required(self) -> bool:
        """Whether an answer is a call."""
        return self.choice in ("required", "named")

    @property
    def names(self) -> tuple[str, ...]:
        """Functions that an answer may call."""
        return self.allowed or tuple(tool["function"]["name"] for tool in self.value)

    @property
    def text(self) -> str:
        """The functions as JSON, for templates."""
        return json.dumps(self.value, ensure_ascii=False)

    def parameters(self, name: str) -> tuple[str, Mapping[str, Any]]:
        """Return path and JSON schema of the parameters of a function.

        Args:
            name: Name of the function.
        """
        number = next(n for n, tool in enumerate(self.value) if tool["function"]["name"] == name)
        schema = self.value[number]["function"].get("parameters") or {}
        return f"tools[{number}].function.parameters", schema


def read_tools(fields: BodyFields) -> Tools | None:
    """Return the functions that a body offers; None without any, or where none is to be called.

    Args:
        fields: Fields of the body.

    Raises:
        HTTPError: A field is wrong.
    """
    tools = fields.any("tools")
    choice = fields.any("tool_choice")
    is_parallel = fields.flag("parallel_tool_calls", True)
    if tools is not None and not isinstance(tools, list):
        raise wrong("tools", f" must be a list of functions, found {type(tools).__name__}")
    tools = tools or []
    if len(tools) > _MOST_TOOLS:
        raise wrong("tools", f" has {len(tools)} functions, at most {_MOST_TOOLS} are taken")
    places = dict[str, int]()
    for number, tool in enumerate(tools):
        name = _check_tool(tool, f"tools[{number}]")
        if name in places:
            raise _wrong(
                f"tools[{number}].function.name",
                f"={name!r} is the name of tools[{places[name]}] too: give each function its own",
            )
        places[name] = number
    if not tools:
        if choice not in (None, "none", "auto"):
            raise wrong("tool_choice", f"={choice!r} asks for a call, and the request has no tools")
        return None
    kind, allowed = _read_choice("auto" if choice is None else choice)
    for path, name in allowed.items():
        if name not in places:
            raise _wrong(path, f"={name!r} is none of the tools: {', '.join(map(repr, places))}")
    if kind == "none":
        return None
    names = tuple(dict.fromkeys(allowed.values()))
    return Tools(value=tuple(tools), choice=kind, allowed=names, is_parallel=is_parallel)


def _check_tool(tool: Any, path: str) -> str:
    """Return the name of a function.

    Raises:
        HTTPError: It is none.
    """
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise _wrong(path, " must be an object {'type': 'function', 'function': {...}}")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _wrong(f"{path}.function", " must be an object with the name of the function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(
            f"{path}.function.name",
            f"={repr(name)[:60]} must be up to 64 letters, digits, '_', '-' and '.'",
        )
    if not isinstance(function.get("description") or "", str):
        raise _wrong(f"{path}.function.description", " must be a text")
    schema = function.get("parameters")
    schema = {} if schema is None else schema
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise _wrong(
            f"{path}.function.parameters",
            f"={repr(schema)[:60]} must be a JSON schema of an object: {{'type': 'object', ...}}",
        )
    return name


def _read_choice(
    choice: Any,
) -> tuple[Literal["none", "auto", "required", "named"], dict[str, str]]:
    """Return the kind of a choice, and the names of the functions that it allows by their paths."""
    if choice == "none" or choice == "auto" or choice == "required":
        return choice, {}
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools"))
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        raise wrong("tool_choice", f"={repr(choice)[:60]} must be {_CHOICES}")
    if not isinstance(name, str):
        raise _wrong("tool_choice.function.name", " must be the name of one of the tools")
    return "named", {"tool_choice.function.name": name}


def _read_allowed(allowed: Any) -> tuple[Literal["auto", "required"], dict[str, str]]:
    """Return the mode of `allowed_tools`, and the names of its functions by their paths."""
    path = "tool_choice.allowed_tools"
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required"):
        raise _wrong(f"{path}.mode", f"={repr(mode)[:60]} must be auto or required")
    if not isinstance(tools, list) or not tools:
        raise _wrong(f"{path}.tools", " must be a list of functions, at least one of them")
    names = dict[str, str]()
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        place = f"{path}.tools[{number}].function.name"
        if not isinstance(name, str):
            raise _wrong(place, " must be the name of one of the tools")
        names[place] = name
    return mode, names


def _wrong(path: str, message: str) -> HTTPError:
    """Return the error of a part of a field."""
    param = path.partition("[")[0].partition(".")[0]
    return HTTPError(400, f"{path}{message}", param=param)
