# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Columns of a study's table: a heading, and the text of a row's cell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from experiments.cli.tables import markdown_table, text_table

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table."""

    heading: str
    cell: Callable[[Row], str]


def number(key: str, form: str) -> Callable[[Row], str]:
    """Return the cell of a number; a dash when it is missing."""
    return lambda row: "-" if row[key] is None else form.format(row[key])


def number_with_interval(key: str, form: str, half: str | None = None) -> Callable[[Row], str]:
    """Return the cell of a number and the half width of its interval.

    Args:
        key: Key of the number.
        form: Format of both.
        half: Key of the half width; `<key>_half_width` when None.
    """
    half = half or f"{key}_half_width"

    def cell(row: Row) -> str:
        if row[key] is None:
            return "-"
        width = "" if row[half] is None else " +- " + form.replace("+", "").format(row[half])
        return form.format(row[key]) + width

    return cell


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns, and the cells of rows that have no numbers.

    Attributes:
        columns: Columns from left to right.
        without_numbers: Function from a row to its cells when it has no numbers, else None.
    """

    columns: tuple[Column, ...]
    without_numbers: Callable[[Row], list[str] | None] = lambda row: None

    def lines(self, rows: Sequence[Row]) -> list[list[str]]:
        """Return the headings and the cells of every row."""
        cells = [
            self.without_numbers(row) or [column.cell(row) for column in self.columns]
            for row in rows
        ]
        return [[column.heading for column in self.columns], *cells]

    def as_text(self, rows: Sequence[Row]) -> str:
        """Return aligned columns for a terminal."""
        return text_table(self.lines(rows))

    def as_markdown(self, rows: Sequence[Row]) -> str:
        """Return a Markdown table."""
        return markdown_table(self.lines(rows))
