# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Calls as Hermes and Qwen write them: a JSON object between two tags.

<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import ClassVar

from jaxmoe.serve.http.tools.base import ToolParserConfig
from jaxmoe.serve.http.tools.call import CallSpelling, FunctionCall
from jaxmoe.serve.http.tools.reader import CallReader, read_calls

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HermesConfig(ToolParserConfig):
    """JSON objects between <tool_call> and </tool_call>: Hermes, Qwen."""

    name: ClassVar[str] = "hermes"
    marks: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    openings: ClassVar[tuple[str, ...]] = (_OPEN,)
    blank_openings: ClassVar[tuple[str, ...]] = ()
    spelling: ClassVar[CallSpelling] = CallSpelling(
        before=f'{_OPEN}\n{{"name": "NAME", "arguments": ',
        after=f"}}\n{_CLOSE}",
        between="\n",
    )

    def fits(self, template: str) -> bool:
        """Return whether it has the tags, and no marks of other contents between them."""
        is_other = "<function=" in template or "<arg_key>" in template
        return _OPEN in template and "arguments" in template and not is_other

    def read(self, reader: CallReader, names: Collection[str]) -> tuple[FunctionCall, ...]:
        """Return one call."""
        reader.take(_OPEN)
        reader.skip_space()
        calls = read_calls(reader.take_json("{"), names)
        reader.skip_space()
        reader.take_end(_CLOSE)
        return calls
