# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes index pages in which every page has a line that says what it is."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator, Mapping

_FENCE = re.compile(r"^(```|:::).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def index_page(title: str, entries: Mapping[str, str], introduction: str = "") -> str:
    """Return the text of an index.

    Args:
        title: Heading of the page.
        entries: What each page is, by the name of the page, in their order.
        introduction: Text above the table.
    """
    return "\n".join(_lines(title, entries, introduction))


def _lines(title: str, entries: Mapping[str, str], introduction: str) -> Iterator[str]:
    yield from (f"# {title}", "")
    if introduction:
        yield from (introduction, "")
    yield from ("| page | contents |", "| --- | --- |")
    for name, text in entries.items():
        yield f"| [{name}]({name}.md) | {text} |"
    yield from ("", "```{toctree}", ":hidden:", "", *entries, "```", "")


def first_sentence(page: str) -> str:
    """Return the first sentence beneath the title of a page, for a cell of a table.

    Args:
        page: Text in Markdown.
    """
    for paragraph in _FENCE.sub("", page).split("\n\n"):
        text = " ".join(paragraph.split())
        if text and not text.startswith(("#", "|", "-", "!", "    ")):
            return _cell(re.split(r"(?<=[.!?])\s", text)[0])
    return ""


def first_line(path: pathlib.Path) -> str:
    """Return the first line of a module's docstring, without importing it."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return _cell(text.partition("\n")[0])


def _cell(text: str) -> str:
    return _LINK.sub(r"\1", text).rstrip(":").replace("|", "\\|").replace("<", "&lt;")
