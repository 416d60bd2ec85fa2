# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of `routers`: one row per method, as text, Markdown and JSON.

The difference to the baseline is paired: seed by seed the two have the same initial values and
batches. Its interval is Student's, 95%, over seeds (`experiments.cli.tables`). Of thirty methods at
95%, one or two lie outside by chance alone.

To add a column: a row of TABLE in experiments/studies/routers/table.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.cli.tables import paired_interval
from experiments.studies.columns import Column, Row, Table, number, number_with_interval
from experiments.studies.routers.config import ObjectiveName

TITLES: dict[ObjectiveName, str] = {
    "autoregressive": "autoregressive: every method here is causal",
    "masked_diffusion": "masked diffusion: tokens may decide about others; bits are bounds",
}


def rows_of(
    records: Iterable[Mapping[str, Any]], objective: ObjectiveName, *, baseline: str, floor: float
) -> list[Row]:
    """Return the rows of one table, the best first; those without a number last.

    Args:
        records: Records of trials.
        objective: Objective of the table. The autoregressive one has causal methods only.
        baseline: Method that the others are paired with.
        floor: Exact bits per token of the languages.
    """
    mine = [r for r in records if r["objective"] == objective and r["status"] != "no ticket"]
    reference = next((r for r in mine if r["method"] == baseline), None)
    rows = [_row(record, reference, floor) for record in mine]
    return sorted(rows, key=lambda row: math.inf if row["bits"] is None else row["bits"])


def _row(record: Mapping[str, Any], reference: Mapping[str, Any] | None, floor: float) -> Row:
    row: Row = {key: record.get(key) for key in ("method", "status", "reason", "causal", "source")}
    corpus = record.get("corpus", {})
    languages = record.get("languages", {})
    row["bits"] = _mean(corpus.get("bits"))
    row["difference"], row["half_width"] = None, None
    if row["bits"] is not None and reference and _mean(reference["corpus"]["bits"]) is not None:
        pairs = zip(corpus["bits"], reference["corpus"]["bits"], strict=True)
        row["difference"], row["half_width"] = paired_interval([a - b for a, b in pairs])
    bits = _mean(languages.get("bits"))
    row["excess_bits"] = None if bits is None else bits - floor
    information = languages.get("mutual_information", ())  # by seed and layer
    row["mutual_information"] = _mean([value for layers in information for value in layers])
    violation = [v for run in corpus.get("max_violation", ()) for v in run if v is not None]
    last = [run[-1] for run in corpus.get("max_violation", ())]
    row["max_violation"] = {
        "mean": _mean(violation),
        "last": _mean(last),
        "sup": max(violation, default=None),
    }
    row["dropped_fraction"] = _mean(corpus.get("dropped_fraction"))
    row["expert_flops_ratio"] = _mean(corpus.get("expert_flops_ratio"))
    row["step_ratio"] = record.get("step_ratio")
    return row


def _mean(values: Sequence[float | None] | None) -> float | None:
    """Return the mean; None if there is no value, or one of them is missing."""
    numbers = [value for value in values or () if value is not None]
    return float(np.mean(numbers)) if numbers and len(numbers) == len(values or ()) else None


def _violation(row: Row) -> str:
    values = row["max_violation"].values()
    return "/".join("-" if value is None else f"{value:.2f}" for value in values)


def _causal(row: Row) -> str:
    return {True: "yes", False: "no", None: "-"}[row["causal"]]


def _without_numbers(row: Row) -> list[str] | None:
    """Return the name, status and reason of a method that has no numbers."""
    if row["bits"] is not None:
        return None
    reason = str(row["reason"] or "").replace("\n", " ")
    return [row["method"], f"{row['status']}: {reason}"]


TABLE = Table(
    (
        Column("method", lambda row: row["method"]),
        Column("bits/byte", number("bits", "{:.4f}")),
        Column("to baseline", number_with_interval("difference", "{:+.4f}", "half_width")),
        Column("excess", number("excess_bits", "{:.4f}")),
        Column("MI", number("mutual_information", "{:.3f}")),
        Column("max violation", _violation),
        Column("dropped", number("dropped_fraction", "{:.1%}")),
        Column("step", number("step_ratio", "{:.2f}x")),
        Column("experts", number("expert_flops_ratio", "{:.2f}x")),
        Column("causal", _causal),
    ),
    _without_numbers,
)
LEGEND = """\
bits/byte: held-out loss; to baseline: difference, paired by seed, 95% interval; excess: bits per
token above the exact entropy of the languages; MI: mutual information of language and expert, 1 is
the largest; max violation: busiest expert over the fair share, minus 1, mean/last/largest over
training; dropped: assignments that exceeded a capacity, or were rounded away; step: time over the
baseline's; experts: FLOPs over the baseline's; causal: whether a token's experts depend on earlier
tokens only, in evaluation"""
