# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of functions in answers: the parsers of families of models, and the one that fits."""

from __future__ import annotations

from jaxmoe.catalog import Registry
from jaxmoe.data.chat import ChatTemplate, ConversationError
from jaxmoe.serve.http.tools.base import ToolParserConfig

TOOL_PARSERS = Registry("tool_parser")


def fitting_parser(template: ChatTemplate) -> ToolParserConfig | None:
    """Return the parser of the calls that a chat template writes; None if it writes none we know.

    Args:
        template: How turns are written.
    """
    try:
        text = template.with_tools("[]").jinja("")
    except ConversationError:
        return None
    parsers = (TOOL_PARSERS[name]() for name in TOOL_PARSERS)
    return next((parser for parser in parsers if parser.fits(text)), None)
