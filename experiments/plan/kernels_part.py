# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Formats the part of a plan about the kernels of its compiled step, and predicts the step by them.

To change what a kernel takes: `jaxmoe/planning/kernel_time.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments.cli.tables import text_table
from experiments.plan.units import size_in_words
from jaxmoe.planning.hardware import H100_RATES, Chip
from jaxmoe.planning.hlo import KernelTraffic, moved_outside
from jaxmoe.planning.kernel_time import collective_seconds, kernel_seconds
from jaxmoe.planning.mesh_axes import AxisBytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelPrediction:
    """A step predicted from the kernels of its compiled program."""

    rows: list[KernelTraffic]
    seconds: list[float]
    """Seconds of each row."""
    collectives: float
    """Seconds of the collectives."""

    @property
    def step(self) -> float:
        """Seconds of a step, kernels and collectives one after the other."""
        return sum(self.seconds) + self.collectives


def predict_by_kernels(
    compiled: Mapping[str, Any], mesh: Mapping[str, int], chip: Chip
) -> KernelPrediction | None:
    """Return the step that a compiled program predicts; None unless it was compiled for a GPU.

    Args:
        compiled: Figures of the compiler.
        mesh: Size by axis, in the order of the devices.
        chip: Properties of each device.
    """
    if not compiled.get("kernels"):
        return None
    rows = [KernelTraffic(**row) for row in compiled["kernels"]]
    traffic = [AxisBytes(**row | {"axes": tuple(row["axes"])}) for row in compiled["traffic"] or ()]
    return KernelPrediction(
        rows=rows,
        seconds=[kernel_seconds(row, chip) for row in rows],
        collectives=collective_seconds(traffic, mesh, chip),
    )


def kernels_part(prediction: KernelPrediction, chip: Chip) -> str:
    """Return the kernels of a step by kind, longest first.

    Args:
        prediction: Step predicted from its kernels.
        chip: Properties of each device.
    """
    table = [("kernels (compiled)", "executions", "moved", "TFLOP", "ms")]
    longest = sorted(zip(prediction.rows, prediction.seconds, strict=True), key=lambda row: -row[1])
    for row, seconds in longest:
        if row.limit == "link":
            continue
        flops = f"{row.flops / 1e12:.3g}" if row.flops else ""
        moved = size_in_words(row.bytes)
        table.append((f"  {_name(row)}", str(row.count), moved, flops, f"{1e3 * seconds:.3g}"))
    if prediction.collectives:
        table.append(("  collectives", "", "", "", f"{1e3 * prediction.collectives:.3g}"))
    rates = chip.kernel_rates
    source = "as measured on an H100"
    if rates != H100_RATES:
        source = "the shares of its peaks that an H100 reached"
    return (
        f"{text_table(table)}\n"
        f"moved outside kernels and products: {size_in_words(moved_outside(prediction.rows))} at"
        f" {rates.copy / 1e12:.3g} TB/s; products at {rates.product / 1e12:.0f} TFLOP/s, grouped"
        f" {rates.grouped / 1e12:.0f},\nattention {rates.attention / 1e12:.0f} forward and"
        f" {rates.attention_both / 1e12:.0f} with backward, {source}"
    )


def _name(row: KernelTraffic) -> str:
    """Return the kind of kernels, with the type of products that are not of bfloat16."""
    types = {"product_float32": ", float32", "product_8bit": ", 8 bits"}
    return row.kind + types.get(row.limit, "")
