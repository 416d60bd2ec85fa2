# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the table of `outer`: one row per method, as text, Markdown and JSON.

The difference to the baseline is paired: seed by seed the two have the same initial values and
batches. Intervals are Student's, 95%, over seeds (`experiments.cli.tables`).

To add a column: a row of TABLE in experiments/studies/outer/table.py
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.cli.tables import paired_interval
from experiments.studies.columns import Column, Row, Table, number, number_with_interval
from experiments.studies.outer.config import BASELINE

_REASON_WIDTH = 90


def rows_of(records: Iterable[Mapping[str, Any]], *, floor: float) -> list[Row]:
    """Return the rows, the best first; those without a number last.

    Args:
        records: Records of trials.
        floor: Exact entropy of the language in bits per token.
    """
    keys = list(records)
    reference = next((record for record in keys if record["method"] == BASELINE), {})
    rows = [_row(record, reference, floor) for record in keys]
    return sorted(rows, key=lambda row: math.inf if row["excess"] is None else row["excess"])


def _row(record: Mapping[str, Any], reference: Mapping[str, Any], floor: float) -> Row:
    row: Row = {key: record.get(key) for key in ("method", "status", "reason", "replicas")}
    bits = _complete(record.get("bits"))
    base = _complete(reference.get("bits"))
    row |= {"excess": None, "excess_half_width": None, "difference": None, "half_width": None}
    row["excess_by_seed"] = None
    if bits is not None:
        row["excess_by_seed"] = [value - floor for value in bits]
        row["excess"], row["excess_half_width"] = paired_interval(row["excess_by_seed"])
    if bits is not None and base is not None and record["method"] != BASELINE:
        pairs = zip(bits, base, strict=True)
        row["difference"], row["half_width"] = paired_interval([a - b for a, b in pairs])
    row["bytes"] = record.get("bytes")
    row["saving"] = None
    if row["bytes"] and reference.get("bytes"):
        row["saving"] = reference["bytes"] / row["bytes"]
    spread = _complete(record.get("spread"))
    row["spread"] = None if spread is None else float(np.mean(spread))
    row["tokens"] = record.get("tokens")
    row["skipped"] = sum(record.get("skipped") or ())
    row["seconds"] = record.get("seconds")
    return row


def _complete(values: Sequence[float | None] | None) -> list[float] | None:
    """Return the values; None if there are none, or one of them is missing."""
    numbers = [value for value in values or () if value is not None]
    return numbers if numbers and len(numbers) == len(values or ()) else None


def as_bytes(value: float) -> str:
    """Return a number of bytes with three digits and a unit."""
    for unit in ("B", "kB", "MB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def _bytes(row: Row) -> str:
    return "-" if row["bytes"] is None else as_bytes(row["bytes"])


def _tokens(row: Row) -> str:
    return "-" if row["tokens"] is None else f"{row['tokens'] / 1000:.0f}k"


def _without_numbers(row: Row) -> list[str] | None:
    """Return the name, status and reason of a method that has no numbers."""
    if row["excess"] is not None:
        return None
    return [row["method"], textwrap.shorten(f"{row['status']}: {row['reason']}", _REASON_WIDTH)]


TABLE = Table(
    (
        Column("method", lambda row: row["method"]),
        Column("bits above floor", number_with_interval("excess", "{:.4f}")),
        Column("to none", number_with_interval("difference", "{:+.4f}", "half_width")),
        Column("sent a step", _bytes),
        Column("less", number("saving", "{:.3g}x")),
        Column("spread", number("spread", "{:.2f}")),
        Column("tokens", _tokens),
        Column("refused", number("skipped", "{}")),
        Column("time", number("seconds", "{:.0f} s")),
    ),
    _without_numbers,
)
LEGEND = """\
bits above floor: held-out bits per token above the exact entropy of the language; to none:
difference to synchronous training, paired by seed; both with 95% intervals over seeds; sent a step:
bytes that a worker sends, as a mean over the steps; less: synchronous bytes over these; spread:
distance of a worker's message from the pseudo-gradient over the norm of the latter, mean after the
first exchange; refused: steps of workers that the guard refused, all seeds; alone: one worker on
its share of each batch, without exchange"""
