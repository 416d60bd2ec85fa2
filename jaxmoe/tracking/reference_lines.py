# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Frames the curves of a loss chart, and labels the reference lines beside them.

The first steps of a run lose many times what the later ones do. The vertical axis covers what comes
after them, so that they leave it at the top; a text says where they begin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]
"""Steps and values of one curve."""

_FIRST_STEPS = 0.1
"""Share of the run that may leave the axis."""
_MARGIN = 0.06
"""Margin above and below the curves, as a share of the axis."""
_LEAST_GAIN = 1.25
"""Height of the whole curve over that of its later part from which on the first steps are cut."""
_LABELS = 0.3
"""Width of a label, as a share of the axis."""


def loss_limits(
    curves: Sequence[Curve], references: Mapping[str, float] | None = None
) -> tuple[float, float] | None:
    """Return the limits of the vertical axis; None if there is nothing to draw.

    Args:
        curves: Curves of a loss.
        references: Values of horizontal lines by label, all within the limits.
    """
    curves = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in curves]
    lines = np.array([*(references or {}).values()], float)
    losses = np.concatenate([*(y for _, y in curves), lines])
    if not losses.size:
        return None
    low = float(losses.min())
    top = float(losses.max())
    ends = [end for x, _ in curves if x.size for end in (x[0], x[-1])]
    first = min(ends) + _FIRST_STEPS * (max(ends) - min(ends)) if ends else 0.0
    later = np.concatenate([*(y[x >= first] for x, y in curves), lines])
    if later.size and top - low > _LEAST_GAIN * (later.max() - low) > 0.0:
        top = float(later.max())
    margin = _MARGIN * (top - low) or 0.05 * abs(top) or 0.1
    return low - margin, top + margin


def note_cut_start(axes: Any, curve: Curve, color: str, size: float) -> None:
    """Write the first value of a curve beside the place where it leaves the axis, if it does.

    Args:
        axes: Panel with its final limits.
        curve: Curve whose beginning may be above the axis.
        color: Colour of the text.
        size: Font size in points.
    """
    x = curve[0][np.isfinite(curve[1])]
    y = curve[1][np.isfinite(curve[1])]
    top = axes.get_ylim()[1]
    if not y.size or y[0] <= top:
        return
    axes.annotate(
        f"from {y[0]:.2f} at step {x[0]:.0f}",
        xy=(x[np.flatnonzero(y > top)[-1]], top),
        xytext=(8, -2),
        textcoords="offset points",
        verticalalignment="top",
        color=color,
        fontsize=size,
        gid="reference",
    )


def draw_references(
    axes: Any,
    references: Mapping[str, float],
    *,
    curves: Sequence[Curve] = (),
    color: str,
    size: float = 8.0,
) -> None:
    """Draw labelled horizontal lines; each label is at the end that the curves leave free.

    Args:
        axes: Panel with its final limits.
        references: Values by label.
        curves: Curves that the labels stay clear of.
        color: Colour of lines and labels.
        size: Font size of the labels in points.
    """
    low, high = axes.get_ylim()
    panel = 72.0 * axes.figure.get_size_inches()[1] * axes.get_position().height
    least = 1.35 * size / panel * (high - low)
    label_at = {"left": -math.inf, "right": -math.inf}
    for label, value in sorted(references.items(), key=lambda pair: pair[1]):
        axes.axhline(value, color=color, linewidth=1.0, linestyle=(0, (4, 3)), gid="reference")
        side = max(("left", "right"), key=lambda end: _clearance(curves, end, value, least))
        label_at[side] = max(value, label_at[side] + least)  # labels of close lines move apart
        axes.annotate(
            f"{label}  {value:.2f}",
            xy=(0.008 if side == "left" else 0.992, label_at[side]),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            horizontalalignment=side,
            color=color,
            fontsize=size,
            gid="reference",
        )


def _clearance(curves: Sequence[Curve], side: str, value: float, height: float) -> float:
    """Return the distance of the curves from a label on a line, at most 3 labels."""
    nearest = 3.0 * height
    ends = [end for x, _ in curves if x.size for end in (x[0], x[-1])]
    for x, y in curves:
        share = (x - min(ends)) / max(max(ends) - min(ends), 1e-9)
        near = y[(share <= _LABELS if side == "left" else share >= 1.0 - _LABELS) & np.isfinite(y)]
        if near.size:
            nearest = min(nearest, float(np.abs(near - value - 0.5 * height).min()))
    return nearest
