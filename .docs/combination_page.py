# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the page "What combines with what" from the rows of `jaxmoe/combinations.py`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from jaxmoe.choices import Choice, Row
from jaxmoe.combinations import all_rows

HEAD = """# What combines with what

Every choice of a run combines with every other, except the pairs below. A config that makes both
choices of a row is refused where it is made, with the values of both and the way out. Sizes that
must divide one another are checked by what cuts them, and named in its message.
"""


def write(target: pathlib.Path) -> None:
    """Write the page.

    Args:
        target: Folder of the generated pages; created when it does not exist.
    """
    target.mkdir(parents=True, exist_ok=True)
    (target / "combinations.md").write_text("\n".join(_lines()), encoding="utf-8")


def _lines() -> Iterator[str]:
    yield HEAD
    for vertical, rows in all_rows().items():
        if vertical:
            yield f"## jaxmoe.contrib.{vertical}"
            yield ""
        yield "| choice | does not combine with | because | way out |"
        yield "| --- | --- | --- | --- |"
        yield from map(line, rows)
        yield ""


def line(row: Row) -> str:
    """Return the line of a row."""
    paths = {"first": _path(row.first), "second": _path(row.second)}
    texts = (row.reason.format(**paths), row.way_out.format(**paths))
    return "| " + " | ".join((row.first.text, row.second.text, *texts)) + " |"


def _path(choice: Choice) -> str:
    return f"`{choice.shown or choice.path}`"
