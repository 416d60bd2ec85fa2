# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Formats tables for terminals and Markdown, and computes Student's interval of a mean.

mean +- t(n - 1) s / sqrt(n),   95%
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxmoe.optional import require


def student(degrees: int) -> float:
    """Return the 0.975 quantile of Student's distribution.

    Args:
        degrees: Degrees of freedom, at least 1.
    """
    return float(require("scipy.special").stdtrit(degrees, 0.975))


def paired_interval(differences: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and half width of the 95% interval; None as the width of one pair."""
    values = np.asarray(differences, float)
    if len(values) < 2:
        return float(values.mean()), None
    spread = float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()), student(len(values) - 1) * spread


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Return aligned columns, the first to the left.

    Args:
        lines: Headings, then rows. A shorter row is text without alignment.
    """
    full_lines = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(len(line[i]) for line in full_lines) for i in range(len(lines[0]))]
    widths[0] = max(len(line[0]) for line in lines)
    return "\n".join(
        "  ".join(
            cell.ljust(width)
            if i == 0
            else cell.rjust(width)
            if len(line) == len(lines[0])
            else cell
            for i, (cell, width) in enumerate(zip(line, widths, strict=False))
        )
        for line in lines
    )


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Return the lines as a Markdown table.

    Args:
        lines: Headings, then rows.
    """
    head, *rows = lines
    filled = [[*row, *[""] * (len(head) - len(row))] for row in rows]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in [head, *filled]]
    escaped.insert(1, ["---", *["---:"] * (len(head) - 1)])
    return "\n".join("| " + " | ".join(row) + " |" for row in escaped)
