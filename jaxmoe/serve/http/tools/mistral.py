# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Calls as Mistral writes them: a mark, and a list of JSON objects, or a name and its arguments.

[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]
[TOOL_CALLS]weather[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import ClassVar

from jaxmoe.serve.http.tools.base import ToolParserConfig
from jaxmoe.serve.http.tools.call import CallSpelling, FunctionCall
from jaxmoe.serve.http.tools.reader import CallReader, NoCall, read_calls, read_object

_MARK = "[TOOL_CALLS]"
_ARGUMENTS = "[ARGS]"
_ID = "[CALL_ID]"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MistralConfig(ToolParserConfig):
    """A list of JSON objects behind [TOOL_CALLS]: Mistral."""

    name: ClassVar[str] = "mistral"
    marks: ClassVar[tuple[str, ...]] = (_MARK, _ARGUMENTS, _ID)
    openings: ClassVar[tuple[str, ...]] = (_MARK,)
    blank_openings: ClassVar[tuple[str, ...]] = ()
    spelling: ClassVar[CallSpelling] = CallSpelling(
        begin=f"{_MARK} [",
        before='{"name": "NAME", "arguments": ',
        after="}",
        between=", ",
        end="]",
    )

    def fits(self, template: str) -> bool:
        """Return whether it has the mark."""
        return _MARK in template

    def read(self, reader: CallReader, names: Collection[str]) -> tuple[FunctionCall, ...]:
        """Return the calls of a list, or one call."""
        reader.take(_MARK)
        reader.skip_space()
        if reader.accepts("["):
            reader.place -= 1
            return read_calls(reader.take_json("["), names)
        name = reader.take_until((_ID, _ARGUMENTS, "{"), r"[\w.-]*")
        if reader.accepts(_ID):
            reader.take_until((_ARGUMENTS,), r"\w*")
        reader.accepts(_ARGUMENTS)
        reader.skip_space()
        arguments = read_object(reader.take_json("{"))
        if name not in names:
            raise NoCall
        return (FunctionCall(name, arguments),)
