# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Calls as Llama 3 writes them: the answer is a JSON object, or several with semicolons between.

{"name": "weather", "parameters": {"city": "Paris"}}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import ClassVar

from jaxmoe.serve.http.tools.base import ToolParserConfig
from jaxmoe.serve.http.tools.call import CallSpelling, FunctionCall
from jaxmoe.serve.http.tools.reader import CallReader, read_calls

_MARK = "<|python_tag|>"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Llama3JsonConfig(ToolParserConfig):
    """JSON objects at the begin of an answer, or behind <|python_tag|>: Llama 3."""

    name: ClassVar[str] = "llama3_json"
    marks: ClassVar[tuple[str, ...]] = (_MARK,)
    openings: ClassVar[tuple[str, ...]] = (_MARK,)
    blank_openings: ClassVar[tuple[str, ...]] = ("{", ";")
    spelling: ClassVar[CallSpelling] = CallSpelling(
        before='{"name": "NAME", "parameters": ', after="}", between="; "
    )

    def fits(self, template: str) -> bool:
        """Return whether it asks for a name and parameters, as Llama 3.1 does."""
        return '"parameters": dictionary of argument name' in template.replace("\\", "")

    def read(self, reader: CallReader, names: Collection[str]) -> tuple[FunctionCall, ...]:
        """Return one call, behind the semicolon that follows another."""
        if reader.accepts(";"):
            reader.skip_space()
        reader.accepts(_MARK)
        reader.skip_space()
        return read_calls(reader.take_json("{"), names)
