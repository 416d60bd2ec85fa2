# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of `transfer` and its verdicts, as text, Markdown and JSON.

One row for each arm and point; one for each arm, with a sentence. A verdict follows the estimate;
the sentence reports where the interval reaches beyond the rule. On the axis balance every arm has a
second verdict: max violation (mean over seeds, at the best rate of each point's grid) falls by
LEAST_FALL or more from the smallest coefficient to the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.studies.transfer.fits import Curve, Interval, Optimum, Transfer

_EDGES = {
    "lowest": "at the edge: the lowest rate",
    "highest": "at the edge: the highest rate",
    "divergence": "at the edge: higher ones diverge",
}
LEAST_FALL = 5.0
LEGEND = """\
best rate: vertex of a parabola in log rate, 95% interval by bootstrap; at the edge: a bound,
nothing is extrapolated; shift: of the best rate from the smallest to the largest point, in
factors of two, at most 1 transfers; exponent: best rate ~ value^exponent; regret: of the
smallest point's best rate at the largest point, in the unit of the loss; max violation: busiest
expert over the fair share, minus 1"""


def curve_of(records: Iterable[Mapping[str, Any]], seeds: Sequence[int]) -> Curve | None:
    """Return the curve of one arm at one point; rates that lack a seed are left out.

    Args:
        records: Records of its trials.
        seeds: Seeds of the sweep.
    """
    bits = {(r["rate"], r["seed"]): r["bits"] for r in records}
    rates = tuple(sorted({rate for rate, _ in bits}))
    complete_rates = tuple(rate for rate in rates if all((rate, seed) in bits for seed in seeds))
    if not complete_rates:
        return None
    losses = [[bits[rate, seed] for seed in seeds] for rate in complete_rates]
    return Curve(rates=complete_rates, losses=np.array(losses, float))  # None becomes NaN


def point_row(
    arm: str, value: float, curve: Curve, optimum: Optimum | None, violation: float | None
) -> dict[str, Any]:
    """Return one arm at one point, as JSON.

    Args:
        arm: Name of the arm.
        value: Value of the axis.
        curve: Losses of the point.
        optimum: Best rate of the curve.
        violation: Max violation at the best rate of the grid.
    """
    means = [float(row.mean()) for row in curve.losses]
    return {
        "arm": arm,
        "value": value,
        "best_rate": None if optimum is None else optimum.rate,
        "interval": None if optimum is None else optimum.interval,
        "loss": None if optimum is None else optimum.loss,
        "edge": None if optimum is None else optimum.edge,
        "diverged_rates": list(curve.diverged_rates),
        "max_violation": violation,
        "rates": list(curve.rates),
        "losses": [mean if math.isfinite(mean) else None for mean in means],
    }


def arm_row(arm: str, transfer: Transfer, claims: bool, bytes_per_unit: float) -> dict[str, Any]:
    """Return one arm, as JSON.

    Args:
        arm: Name of the arm.
        transfer: Fits of the arm.
        claims: Whether the arm claims to keep its rate along this axis.
        bytes_per_unit: Factor from bits to bits per token.
    """
    nats = math.log(2.0) * bytes_per_unit
    return {
        "arm": arm,
        "verdict": transfer.verdict,
        "fitted": sorted(transfer.optima),
        "claims_transfer": claims,
        "shift": transfer.shift,
        "shift_bound": transfer.shift_bound,
        "shift_interval": transfer.shift_interval,
        "exponent": transfer.exponent,
        "exponent_interval": transfer.exponent_interval,
        "regret": transfer.regret,
        "regret_interval": transfer.regret_interval,
        "regret_nats_per_token": None if transfer.regret is None else transfer.regret * nats,
    }


def point_lines(rows: Sequence[Mapping[str, Any]], axis: str, unit: str) -> list[list[str]]:
    """Return headings and cells of the points; remarks on one are a line of text below it."""
    lines = [["arm", axis, "best rate", "95% interval", unit, "max violation"]]
    for row in rows:
        remarks = [] if row["edge"] is None else [_EDGES[row["edge"]]]
        if row["best_rate"] is None:
            remarks.append("fewer than three rates ended")
        if row["diverged_rates"]:
            remarks.append(f"diverged at {_rates(row['diverged_rates'])}")
        lines.append(
            [
                row["arm"],
                f"{row['value']:g}",
                _number(row["best_rate"], "{:.3g}"),
                _interval(row["interval"], "{:.3g}"),
                _number(row["loss"], "{:.4f}"),
                _number(row["max_violation"], "{:.2f}"),
            ]
        )
        if remarks:
            lines.append(["", "; ".join(remarks)])
    return lines


def arm_lines(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return headings and cells of the arms."""
    heads = ["arm", "shift", "95% interval", "exponent", "95% interval", "regret", "95% interval"]
    lines = [[*heads, "verdict"]]
    for row in rows:
        at_least = "at least " if row["shift_bound"] == "at least" else ""
        lines.append(
            [
                row["arm"],
                "-" if row["shift_bound"] == "unknown" else f"{at_least}{row['shift']:+.2f}",
                _interval(row["shift_interval"], "{:+.2f}"),
                _number(row["exponent"], "{:+.2f}"),
                _interval(row["exponent_interval"], "{:+.2f}"),
                _number(row["regret"], "{:.4f}"),
                _interval(row["regret_interval"], "{:.4f}"),
                row["verdict"],
            ]
        )
    return lines


def sentence(
    row: Mapping[str, Any],
    axis: str,
    values: Sequence[float],
    unit: str,
    *,
    unfinished: Sequence[float] = (),
) -> str:
    """Return the verdict on an arm as a sentence.

    Args:
        row: Row of `arm_row`.
        axis: Name of the axis.
        values: Values of the arm's points, rising.
        unit: Unit of the loss.
        unfinished: Values of planned points that lack a rate.
    """
    if not unfinished:
        return _verdict(row, axis, values, unit)
    lacking = ", ".join(f"{value:g}" for value in unfinished)
    return (
        f"{_verdict(row, axis, values, unit)}; not finished: rates are missing at {axis} {lacking}"
    )


def _verdict(row: Mapping[str, Any], axis: str, values: Sequence[float], unit: str) -> str:
    """Return the verdict over the points that are there."""
    first = values[0]
    last = values[-1]
    where = f"over {axis} {first:g} to {last:g} (a factor of {last / first:g})"
    if row["verdict"] == "undecided":
        few = " and ".join(f"{value:g}" for value in (first, last) if value not in row["fitted"])
        if few:
            return f"{row['arm']}: undecided {where}: fewer than three rates ended at {few}"
        return (
            f"{row['arm']}: undecided {where}: a best rate is at the edge of its grid; give more"
            " --rates, or a larger --extend"
        )
    bound = "at least " if row["shift_bound"] == "at least" else ""
    text = (
        f"{row['arm']}: {row['verdict']} {where}: the best rate changed by a factor of {bound}"
        f"2^{row['shift']:.2f}{_between(row['shift_interval'], '2^{:.2f}')}"
    )
    if _is_doubtful(row["shift"], row["shift_interval"]):
        text += ", and the interval exceeds the limit of 2^1"
    if row["regret"] is None:
        return f"{text}; the best rate of {first:g} is outside the rates that ended at {last:g}"
    return (
        f"{text}; using the rate of {first:g} at {last:g} costs {row['regret']:.4f} {unit}"
        f"{_between(row['regret_interval'], '{:.4f}')}"
    )


def balance_rows(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return how far max violation falls along the axis balance, by arm, as JSON.

    Args:
        points: Rows of `point_row`; those without a max violation are left out.
    """
    table_rows = []
    for arm in dict.fromkeys(row["arm"] for row in points):
        violations = {row["value"]: row["max_violation"] for row in points if row["arm"] == arm}
        values = sorted(value for value, violation in violations.items() if violation is not None)
        if len(values) < 2:
            continue
        first = values[0]
        last = values[-1]
        fall = violations[first] / max(violations[last], np.finfo(float).tiny)
        passes = fall >= LEAST_FALL
        table_rows.append({"arm": arm, "values": [first, last], "fall": fall, "passes": passes})
    return table_rows


def balance_sentence(row: Mapping[str, Any]) -> str:
    """Return a row of `balance_rows` as a sentence."""
    first, last = row["values"]
    rule = (
        f"{LEAST_FALL:g}x or more: passes" if row["passes"] else f"less than {LEAST_FALL:g}x: fails"
    )
    return (
        f"{row['arm']}: max violation falls {row['fall']:.1f}x from {first:g} to {last:g} ({rule})"
    )


def _is_doubtful(shift: float, interval: Interval | None) -> bool:
    """Return whether part of the interval has the other verdict."""
    if interval is None:
        return False
    low, high = interval
    if abs(shift) <= 1.0:
        return low < -1.0 or high > 1.0
    return low <= 1.0 if shift > 0.0 else high >= -1.0


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _interval(value: Sequence[float] | None, form: str) -> str:
    return "-" if value is None else f"{form.format(value[0])} to {form.format(value[1])}"


def _between(value: Sequence[float] | None, form: str) -> str:
    return "" if value is None else f" (95% {_interval(value, form)})"


def _rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.3g}" for rate in rates)
