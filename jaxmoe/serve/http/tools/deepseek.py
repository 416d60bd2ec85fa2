# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Calls as DeepSeek writes them, with marks around each call and around all of them.

V3 and R1 write the type of a call and its arguments in a block of code; V3.1 writes name and
arguments alone. Both are read by both members, which differ in what a grammar makes a model write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import ClassVar

from jaxmoe.serve.http.tools.base import ToolParserConfig
from jaxmoe.serve.http.tools.call import CallSpelling, FunctionCall
from jaxmoe.serve.http.tools.reader import CallReader, NoCall, read_object

_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_FENCE = "```"
_NAME = r"[\w.-]*"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeepSeekV3Config(ToolParserConfig):
    """Names and blocks of JSON between marks: DeepSeek V3, R1."""

    name: ClassVar[str] = "deepseek_v3"
    marks: ClassVar[tuple[str, ...]] = (_BEGIN, _CALL, _SEPARATOR, _CALL_END, _END)
    openings: ClassVar[tuple[str, ...]] = (_BEGIN, _CALL)
    blank_openings: ClassVar[tuple[str, ...]] = ()
    spelling: ClassVar[CallSpelling] = CallSpelling(
        begin=_BEGIN,
        before=f"{_CALL}function{_SEPARATOR}NAME\n{_FENCE}json\n",
        after=f"\n{_FENCE}{_CALL_END}",
        between="\n",
        end=_END,
    )

    def fits(self, template: str) -> bool:
        """Return whether it has the marks, and blocks of code."""
        return _BEGIN in template and f"{_FENCE}json" in template

    def read(self, reader: CallReader, names: Collection[str]) -> tuple[FunctionCall, ...]:
        """Return one call, with the marks of all where it is the first or the last."""
        if reader.accepts(_BEGIN):
            reader.skip_space()
        reader.take(_CALL)
        name = reader.take_until((_SEPARATOR,), _NAME)
        reader.take(_SEPARATOR)
        has_fence = False
        if not reader.accepts("{"):
            name = reader.take_until(("\n", " "), _NAME)
            reader.skip_space()
            has_fence = reader.accepts(f"{_FENCE}json")
            reader.skip_space()
        else:
            reader.place -= 1
        arguments = read_object(reader.take_json("{"))
        if name not in names:
            raise NoCall
        reader.skip_space()
        if has_fence:
            reader.take(_FENCE)
            reader.skip_space()
        reader.take_end(_CALL_END)
        place = reader.place
        reader.skip_space()
        if not reader.accepts(_END):
            reader.place = place
        return (FunctionCall(name, arguments),)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeepSeekV31Config(DeepSeekV3Config):
    """Names and JSON between marks: DeepSeek V3.1."""

    name: ClassVar[str] = "deepseek_v31"
    spelling: ClassVar[CallSpelling] = CallSpelling(
        begin=_BEGIN,
        before=f"{_CALL}NAME{_SEPARATOR}",
        after=_CALL_END,
        between="",
        end=_END,
    )

    def fits(self, template: str) -> bool:
        """Return whether it has the marks, and no blocks of code."""
        return _BEGIN in template and f"{_FENCE}json" not in template
