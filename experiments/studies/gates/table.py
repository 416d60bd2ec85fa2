# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the table of `gates` and its verdicts on SqrtGate's claims.

    to first K   RMS of the MoE branch at a point over that of the first point of its axis and gate
                 (K = 1: of a single expert), means over initial values. The claim "SqrtGate keeps
                 the RMS" is: every ratio is in [0.98, 1.02]. It holds where all intervals are
                 inside, fails where one interval is wholly outside, and is undecided otherwise. The
                 interval (95%) is that of the ratio of the two means, paired by seed:
                 t s(y_i - ratio x_i) / (sqrt(n) mean(x))
    neglected    sqrt(1 + rho (K - 1)): what the measured correlation rho adds to the RMS of a
                 mixture with uniform gates
    drift        RMS after training over the RMS at initialisation

This claim and those about the loss and the router Z are decided only where an interval is on one
side of the limit. The other claims have no interval and follow the estimate of one training.

To add a column: a row of TABLES in experiments/studies/gates/table.py; a claim: `verdicts` there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.cli.tables import paired_interval
from experiments.studies.columns import Column, Row, Table, number, number_with_interval
from experiments.studies.gates.config import COMPARED, Axis, Gate, GatesConfig, Point, points_of
from experiments.studies.trials import Record

TOLERANCE = 0.02
"""Tolerance of the claim that SqrtGate keeps the RMS at initialisation."""

TITLES: dict[Axis, str] = {
    "top_k": "top_k: the same experts throughout",
    "granularity": "granularity: finer experts, the same active parameters",
}


def rows_of(config: GatesConfig, records: Mapping[Point, Record]) -> list[Row]:
    """Return one row per measured point, in the order of the comparison."""
    rows = []
    for point in points_of(config):
        record = records.get(point)
        if record is None:
            continue
        first = config.top_ks[0]
        reference = records.get(Point(point.axis, point.gate, first))
        if first == 1:  # where both gates are one and the same
            reference = records.get(Point(point.axis, "sqrt", 1))
        rows.append(_row(point, record, reference))
    return rows


def _row(point: Point, record: Record, reference: Record | None) -> Row:
    initial = record["initial"]
    trained = record["trained"] or {}
    rms, half = interval(initial["rms"])
    rho, rho_half = interval(initial["correlation"])
    after = interval(trained.get("rms"))[0]
    row: Row = {
        "axis": point.axis,
        "gate": point.gate,
        "top_k": point.top_k,
        "num_experts": record["moe"]["num_experts"],
        "expert_dim": record["moe"]["expert_dim"],
        "rms": rms,
        "rms_half_width": half,
        "correlation": rho,
        "correlation_half_width": rho_half,
        "neglected": None if rho is None else math.sqrt(max(1.0 + rho * (point.top_k - 1), 0.0)),
        "ratio": None,
        "ratio_half_width": None,
        "rms_after": after,
        "drift": None if after is None or not rms else after / rms,
        "correlation_after": interval(trained.get("correlation"))[0],
        "bits": interval(trained.get("bits"))[0],
        "bits_by_seed": trained.get("bits"),
        "router_z_initial": interval(initial["router_z"])[0],
        "router_z": interval(trained.get("router_z"))[0],
        "router_z_peak": max((v for v in trained.get("router_z_peak", ()) if v), default=None),
        "router_z_peak_by_seed": trained.get("router_z_peak"),
        "skipped": sum(trained.get("skipped", ())),
    }
    if reference is not None and rms:
        base = interval(reference["initial"]["rms"])[0]
        if base:
            row["ratio"] = rms / base
            pairs = zip(initial["rms"], reference["initial"]["rms"], strict=True)
            _, spread = paired_interval([y - row["ratio"] * x for y, x in pairs])
            row["ratio_half_width"] = None if spread is None else spread / base
    return row


def interval(values: Sequence[float | None] | None) -> tuple[float | None, float | None]:
    """Return mean and half width (95%) of some numbers; None where one of them is missing."""
    if not values or any(value is None for value in values):
        return None, None
    return paired_interval([value for value in values if value is not None])


def verdicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the verdict on every claim: a name, a verdict, and the numbers as text."""
    verdict_rows = []
    for axis in dict.fromkeys(row["axis"] for row in rows):
        mine = [row for row in rows if row["axis"] == axis]
        for claim in (_keeps_rms, _shrinks, _drifts, _loses, _grows):
            if (verdict := claim(axis, mine)) is not None:
                verdict_rows.append({"axis": axis, **verdict})
    return verdict_rows


def _of(rows: Sequence[Row], gate: Gate, key: str) -> list[Row]:
    return [row for row in rows if row["gate"] == gate and row[key] is not None]


def _said(name: str, verdict: str, sentence: str) -> dict[str, str]:
    return {"claim": name, "verdict": verdict, "words": sentence}


def _keeps_rms(axis: Axis, rows: Sequence[Row]) -> dict[str, str] | None:
    """Judge whether the RMS at initialisation stays within 2%, intervals included."""
    ratios = _of(rows, "sqrt", "ratio")
    if len(ratios) < 2:
        return None

    def off(row: Row, sign: float) -> float:
        """Return the distance of a ratio from 1 at the far (1) or near (-1) end of its interval."""
        return abs(row["ratio"] - 1.0) + sign * (row["ratio_half_width"] or 0.0)

    worst = max(ratios, key=lambda row: off(row, -1.0))
    verdict = "fails"
    if off(worst, -1.0) <= TOLERANCE:  # none is sure to be outside
        worst = max(ratios, key=lambda row: off(row, 1.0))
        verdict = "holds" if off(worst, 1.0) <= TOLERANCE else "undecided"
    sentence = (
        f"RMS at initialisation over that of K={ratios[0]['top_k']}: farthest from 1 at"
        f" K={worst['top_k']}, {worst['ratio']:.4f} +- {worst['ratio_half_width'] or 0.0:.4f}"
    )
    if worst["correlation"] is not None:
        sentence += (
            f"; correlation there {worst['correlation']:+.5f} +-"
            f" {worst['correlation_half_width'] or 0.0:.5f}, which alone would give"
            f" {worst['neglected']:.4f}"
        )
    return _said(f"SqrtGate keeps the RMS within {TOLERANCE:.0%}", verdict, sentence)


def _shrinks(axis: Axis, rows: Sequence[Row]) -> dict[str, str] | None:
    """Judge whether the RMS with renormalized gates falls as a power of K (-1/2 for uniform
    gates)."""
    rms_by_top_k = _of(rows, "renormalized", "rms")
    if len(rms_by_top_k) < 2:
        return None
    ks, sizes = (np.log([row[key] for row in rms_by_top_k]) for key in ("top_k", "rms"))
    power = float(np.polyfit(ks, sizes, 1)[0])
    verdict = "holds" if power < -0.25 else "fails"
    sentence = f"RMS at initialisation ~ K^{power:.2f} (uniform gates: K^-0.50)"
    return _said("softmax gates shrink the branch", verdict, sentence)


def _drifts(axis: Axis, rows: Sequence[Row]) -> dict[str, str] | None:
    """Judge whether the RMS after training differs less over K with SqrtGate."""
    spreads = {}
    for gate in COMPARED:
        sizes = [row["rms_after"] for row in _with_first(rows, gate)]
        if len(sizes) > 1:
            spreads[gate] = max(sizes) / min(sizes)
    if len(spreads) < 2:
        return None
    verdict = "holds" if spreads["sqrt"] < spreads["renormalized"] else "fails"
    sentence = ", ".join(f"{gate} {spread:.2f}x" for gate, spread in spreads.items())
    name = "once trained, the RMS differs less over K with SqrtGate"
    return _said(name, verdict, f"largest over smallest: {sentence}")


def _loses(axis: Axis, rows: Sequence[Row]) -> dict[str, str] | None:
    """Judge the held-out loss against renormalized gates."""
    comparison = _pair(rows, "bits")
    if comparison is None:
        return None
    verdict, sentence = comparison
    return _said("SqrtGate has the lower loss", verdict, sentence.format("bits per token"))


def _grows(axis: Axis, rows: Sequence[Row]) -> dict[str, str] | None:
    """Judge the peak of the router Z against renormalized gates."""
    comparison = _pair(rows, "router_z_peak")
    if comparison is None:
        return None
    verdict, sentence = comparison
    return _said("the router Z peaks lower with SqrtGate", verdict, sentence.format("at its peak"))


def _pair(rows: Sequence[Row], key: str) -> tuple[str, str] | None:
    """Return whether a number is lower with SqrtGate, paired by K and seed, and the numbers as
    text."""
    pairs = [
        mine - theirs
        for row in _of(rows, "sqrt", key)
        for renormalized in _of(rows, "renormalized", key)
        if row["top_k"] == renormalized["top_k"]
        for mine, theirs in zip(row[f"{key}_by_seed"], renormalized[f"{key}_by_seed"], strict=True)
        if mine is not None and theirs is not None
    ]
    if not pairs:
        return None
    mean, half = paired_interval(pairs)
    verdict = "undecided" if half is None or abs(mean) <= half else "holds" if mean < 0 else "fails"
    width = "" if half is None else f" +- {half:.4f}"
    return verdict, f"{mean:+.4f}{width} {{}} over {len(pairs)} pairs of one K and seed"


def _with_first(rows: Sequence[Row], gate: Gate) -> list[Row]:
    """Return the trained rows of one gate; K = 1 belongs to both."""
    trained = [row for row in rows if row["rms_after"] is not None]
    return [row for row in trained if row["gate"] == gate or row["top_k"] == 1]


_POINT = (
    Column("gate", lambda row: "both" if row["top_k"] == 1 else row["gate"]),
    Column("K", number("top_k", "{}")),
    Column("experts", lambda row: f"{row['num_experts']} x {row['expert_dim']}"),
)
TABLES = {
    "before training": Table(
        (
            *_POINT,
            Column("RMS", number_with_interval("rms", "{:.4f}")),
            Column("to first K", number_with_interval("ratio", "{:.3f}")),
            Column("correlation", number_with_interval("correlation", "{:.4f}")),
            Column("neglected", number("neglected", "{:.3f}")),
        )
    ),
    "after training": Table(
        (
            *_POINT,
            Column("RMS", number("rms_after", "{:.3f}")),
            Column("drift", number("drift", "{:.2f}x")),
            Column("correlation", number("correlation_after", "{:.3f}")),
            Column("bits", number("bits", "{:.4f}")),
            Column("router Z", number("router_z", "{:.1f}")),
            Column("peak", number("router_z_peak", "{:.1f}")),
        )
    ),
}
LEGEND = """\
K: experts per token; experts: number x width; RMS: of the output of the routed experts; to first
K: over that of the first K of the axis; correlation: of the outputs of two chosen experts;
neglected: factor by which it raises the RMS; drift: RMS after training over before; bits: held-out
loss, bits per token; router Z: mean square of the logits' logsumexp at the end, and its peak over
training; +-: 95% interval"""
