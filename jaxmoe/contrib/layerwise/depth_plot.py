# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws what every layer of a model contributes, as one PNG file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmoe.contrib.layerwise.depth import FREE, DepthMeasures
from jaxmoe.optional import require
from jaxmoe.tracking.plots import figure_of_panels, save_figure

_LEAST_ERROR = 1e-4
_BLUE, _ORANGE, _GREY = "#2563a8", "#d97706", "#6b7280"


def plot_depth(
    path: str | os.PathLike[str],
    measures: DepthMeasures,
    *,
    errors: np.ndarray | None = None,
    other_layers: Sequence[str] = (),
    title: str = "",
) -> None:
    """Draw contributions, effects of leaving layers out, and maps to another run.

    Args:
        path: The PNG file.
        measures: Measures of the layers.
        errors: Relative error of linear maps to the layers of another run [n m]; None draws none.
        other_layers: Name of each layer of the other run [m].
        title: Sentence above the panels.
    """
    rows, columns = (1, 3) if errors is None else (2, 2)
    width = 4.8 * columns + 0.8 * (rows - 1)
    height = 4.4 * rows
    figure, panels = figure_of_panels(width, height, rows, columns)
    layers = measures.layers
    places = np.arange(len(layers))
    _contributions(panels[0], places, measures.ratio, measures.cosine)
    panels[1].bar(places, 100.0 * measures.output, color=_BLUE, width=0.7)
    panels[1].axhline(100.0 * FREE, color=_ORANGE, linewidth=1.2, linestyle="--")
    panels[1].set_ylabel("change of the prediction, %")
    panels[1].set_title(f"output without the layer (dashed: {FREE:.0%})")
    for axes in panels[:2]:
        axes.set_xlabel("layer")
        _name(axes.xaxis, layers)
    _map(
        figure,
        panels[2],
        measures.later,
        title="later layers without the layer",
        label="change of the branch / branch",
        names=(layers, layers),
    )
    panels[2].set(xlabel="later layer", ylabel="layer left out")
    if errors is not None:
        _map(
            figure,
            panels[3],
            np.log10(np.maximum(errors, _LEAST_ERROR)),
            title="linear map to the other run",
            label=f"log10 of the relative error, at least {_LEAST_ERROR:g}",
            names=(layers, other_layers),
        )
        best = errors.argmin(axis=1)
        panels[3].plot(best, places, "o", color="white", markeredgecolor="black", markersize=6)
        panels[3].set(xlabel="layer of the other run (circle: nearest)", ylabel="layer")
    if title:
        figure.suptitle(title)
    save_figure(figure, path)


def _contributions(axes: Any, places: np.ndarray, ratio: np.ndarray, cosine: np.ndarray) -> None:
    """Draw the size of the branches as bars, and their direction on a second axis."""
    axes.bar(places, ratio, color=_BLUE, width=0.7)
    axes.set_yscale("log")
    if (ratio > 0.0).any():
        axes.set_ylim(bottom=0.5 * ratio[ratio > 0.0].min())
    axes.set_ylabel("|branch| / |stream|", color=_BLUE)
    axes.set_title("contribution of the layer")
    right_axes = axes.twinx()
    right_axes.plot(places, cosine, "o-", color=_ORANGE, linewidth=1.6, markersize=4)
    right_axes.axhline(0.0, color=_GREY, linewidth=0.8, linestyle=":")
    right_axes.set_ylim(-1.05, 1.05)
    right_axes.set_ylabel("cosine of branch and stream", color=_ORANGE)
    right_axes.spines["top"].set_visible(False)
    right_axes.grid(visible=False)


def _map(
    figure: Any,
    axes: Any,
    values: np.ndarray,
    *,
    title: str,
    label: str,
    names: tuple[Sequence[str], Sequence[str]],
) -> None:
    """Draw an array [rows columns] in colours."""
    shown = np.ma.masked_invalid(values)
    image = axes.imshow(shown, aspect="auto", cmap="viridis", interpolation="nearest")
    figure.colorbar(image, ax=axes, label=label)
    axes.grid(visible=False)
    axes.set_title(title)
    _name(axes.yaxis, names[0])
    _name(axes.xaxis, names[1])


def _name(axis: Any, names: Sequence[str]) -> None:
    """Write at most twelve names of layers on an axis."""
    ticker = require("matplotlib.ticker")
    step = -(-len(names) // 12)
    axis.set_major_locator(ticker.FixedLocator(range(0, len(names), step)))
    axis.set_major_formatter(ticker.FixedFormatter(list(names)[::step]))
