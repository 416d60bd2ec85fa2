# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws PNG files of a run with matplotlib.

    loss.png           training and held-out loss in bits per byte (or token), with reference lines
    router_load.png    load of every expert over the run, one panel per layer, 1.0 = fair
    routing.png        loss, and on the same steps max violation and entropies of the routers
    optimizer.png      learning rate and gradient norm
    rewards.png        reward and solved share of a run on its own answers, and their length

pyplot is not used: no global state, no display, safe in a thread. Each function draws one file from
arrays; `plot_run` draws all that the files of a run allow. `charts.py` draws the charts of the
report with the same panels.

To add a plot: a function and a line in `plot_run`, both in `jaxmoe/tracking/plots.py`.
"""

from __future__ import annotations

import io
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxmoe.disk import replace_file
from jaxmoe.optional import require
from jaxmoe.tracking.history import read_router_load
from jaxmoe.tracking.jsonl import Series
from jaxmoe.tracking.reference_lines import draw_references, loss_limits, note_cut_start
from jaxmoe.tracking.smoothing import bin_means, smooth
from jaxmoe.tracking.tracker import (
    ANSWER_LENGTH,
    BITS_PER_BYTE,
    BITS_PER_TOKEN,
    GRADIENT_NORM,
    LEARNING_RATE,
    LOAD_ENTROPY,
    LOSS,
    MAX_VIOLATION,
    REWARD,
    ROUTER_ENTROPY,
    SOLVED,
)

DPI = 110
BLUE, ORANGE, GRAY = "#2563a8", "#d1571f", "#6b7280"


def plot_run(
    series: Series,
    router_file: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    references: Mapping[str, float] | None = None,
    bytes_per_token: float | None = 1.0,
) -> list[pathlib.Path]:
    """Draw all pictures of a run.

    Args:
        series: Steps and values by metric, of `metrics.jsonl`.
        router_file: `router.npz`; need not exist.
        directory: Where the PNG files go.
        references: Loss of other predictors by label, in the same unit, drawn as lines into it.
        bytes_per_token: Of the tokenizer, to draw the loss in bits per byte; bits per token if
            None.

    Returns:
        The files, in the order of the report.

    Raises:
        MissingPackageError: If matplotlib is not installed.
        OSError: If a file cannot be written.
    """
    directory = pathlib.Path(directory)
    written = []
    if LOSS in series:
        written.append(directory / "loss.png")
        plot_loss(
            written[-1],
            series[LOSS],
            series.get(BITS_PER_TOKEN if bytes_per_token is None else BITS_PER_BYTE),
            references=references,
            bytes_per_token=bytes_per_token,
        )
    if pathlib.Path(router_file).exists():
        steps, load = read_router_load(router_file)
        if load.size:
            written.append(directory / "router_load.png")
            plot_router_load(written[-1], steps, load)
    if LOSS in series and ROUTER_ENTROPY in series and LOAD_ENTROPY in series:
        written.append(directory / "routing.png")
        routing = (series[ROUTER_ENTROPY], series[LOAD_ENTROPY], series.get(MAX_VIOLATION))
        plot_routing(written[-1], series[LOSS], *routing)
    if LEARNING_RATE in series and GRADIENT_NORM in series:
        written.append(directory / "optimizer.png")
        plot_optimizer(written[-1], series[LEARNING_RATE], series[GRADIENT_NORM])
    if all(name in series for name in (REWARD, SOLVED, ANSWER_LENGTH)):
        written.append(directory / "rewards.png")
        plot_rewards(written[-1], series[REWARD], series[SOLVED], series[ANSWER_LENGTH])
    return written


def plot_loss(
    path: str | os.PathLike[str],
    training: tuple[np.ndarray, np.ndarray],
    held_out: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    references: Mapping[str, float] | None = None,
    bytes_per_token: float | None = 1.0,
) -> None:
    """Draw training and held-out loss on one axis, bits per byte or per token.

    Args:
        path: The PNG file.
        training: Steps [n] and cross-entropy [n] in nats per token.
        held_out: Steps [m] and loss [m] in the unit of the axis.
        references: Loss by label in the unit of the axis: horizontal lines.
        bytes_per_token: Converts the one unit into the other; the axis has bits per token if None.
    """
    figure, (axes,) = figure_of_panels(width=9.5, height=5.0)
    nats_per_bit = math.log(2.0) * (bytes_per_token or 1.0)
    steps, loss = training
    bits = loss / nats_per_bit
    axes.plot(steps, bits, color=BLUE, alpha=0.3, linewidth=1.0)
    axes.plot(steps, smooth(bits), color=BLUE, linewidth=1.8, label="training (smoothed)")
    curves = [(steps, bits)]
    if held_out is not None:
        axes.plot(*held_out, color=ORANGE, linewidth=1.8, marker="o", ms=4, label="held out")
        curves.append(held_out)
    if (limits := loss_limits(curves, references)) is not None:
        axes.set_ylim(*limits)
    axes.margins(x=0.01)
    draw_references(axes, references or {}, curves=curves, color=GRAY)
    note_cut_start(axes, curves[0], GRAY, 8.0)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per token" if bytes_per_token is None else "bits per byte")
    nats = axes.secondary_yaxis("right", functions=(_times(nats_per_bit), _times(1 / nats_per_bit)))
    nats.set_ylabel("nats per token", color=GRAY)
    nats.tick_params(colors=GRAY)
    axes.legend(loc="upper right", frameon=False)
    save_figure(figure, path)


def plot_router_load(path: str | os.PathLike[str], steps: np.ndarray, load: np.ndarray) -> None:
    """Draw the load of every expert over the run, one panel per layer, on one colour scale.

    Args:
        path: The PNG file.
        steps: [n], rising.
        load: [n L E] shares of the assignments; drawn as multiples of the fair share 1/E.
    """
    colors = require("matplotlib.colors")
    _, layers, experts = load.shape
    edges, ratio = bin_means(steps, load * experts)
    columns = min(layers, max(2, math.ceil(math.sqrt(layers / 2))), 6)
    rows = math.ceil(layers / columns)
    width = 2.6 + (9.0 if columns == 1 else 4.2 if columns == 2 else 3.0) * columns
    panel = min(3.0, 1.2 + 0.02 * experts + (0.6 if rows <= 2 else 0.0))
    figure, panels = figure_of_panels(
        width=width, height=1.4 + panel * rows, rows=rows, columns=columns
    )
    top = math.ceil(2.0 * float(np.clip(np.quantile(ratio, 0.995), 1.5, 6.0))) / 2.0
    norm = colors.TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=top)
    image = None
    for layer, axes in enumerate(panels):
        if layer >= layers:
            axes.set_visible(False)
            continue
        image = axes.imshow(
            ratio[:, layer].T,
            extent=(edges[0], edges[-1], experts - 0.5, -0.5),
            aspect="auto",
            interpolation="nearest",
            cmap="RdBu_r",
            norm=norm,
        )
        worst = ratio[-1, layer].max()
        axes.set_title(f"layer {layer}   busiest at the end: {worst:.2f}x", fontsize=9, loc="left")
        axes.grid(visible=False)
        axes.yaxis.get_major_locator().set_params(integer=True, nbins=5)
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)
        if layer % columns == 0:
            axes.set_ylabel("expert")
        if layer + columns >= layers:
            axes.set_xlabel("step")
        else:
            axes.tick_params(labelbottom=False)
    bar = figure.colorbar(
        image, ax=panels[:layers], location="top", extend="max", aspect=50, shrink=0.5
    )
    bar.set_ticks([0.0, 0.5, 1.0, (1.0 + top) / 2.0, top])
    bar.ax.xaxis.set_major_formatter("{x:g}")
    bar.set_label("load / fair share   (1 = fair, 0 = dead)", fontsize=9)
    figure.suptitle(f"Router load (layers: {layers}, experts: {experts})", fontsize=11)
    save_figure(figure, path)


def plot_routing(
    path: str | os.PathLike[str],
    loss: tuple[np.ndarray, np.ndarray],
    router_entropy: tuple[np.ndarray, np.ndarray],
    load_entropy: tuple[np.ndarray, np.ndarray],
    max_violation: tuple[np.ndarray, np.ndarray] | None = None,
) -> None:
    """Draw the loss, and below it the metrics of the routers on the same steps.

    Args:
        path: The PNG file.
        loss: Steps and training loss, nats per token.
        router_entropy: Steps and values over log E: 1 is undecided.
        load_entropy: Steps and values over log E: 1 is balanced.
        max_violation: Steps and values, of the worst layer.
    """
    rows = [("loss, nats/token", [(BLUE, "", loss)])]
    if max_violation is not None:
        rows.append(("max violation", [(BLUE, "", max_violation)]))
    entropies = [
        (BLUE, "router's probabilities (1 = undecided)", router_entropy),
        (ORANGE, "load (1 = balanced)", load_entropy),
    ]
    rows.append(("entropy / log E", entropies))
    figure, panels = figure_of_panels(width=9.5, height=0.6 + 2.2 * len(rows), rows=len(rows))
    for axes, (label, curves) in zip(panels, rows, strict=True):
        for color, name, (steps, values) in curves:
            axes.plot(steps, values, color=color, alpha=0.3, linewidth=1.0)
            axes.plot(steps, smooth(values), color=color, linewidth=1.8, label=name)
        axes.set_ylabel(label)
        axes.margins(x=0.01)
        axes.set_xlim(panels[0].get_xlim())
        axes.tick_params(labelbottom=axes is panels[-1])
    if max_violation is not None:
        panels[1].set_ylim(bottom=0.0)
    panels[-1].legend(loc="best", frameon=False)
    panels[-1].set_xlabel("step")
    figure.align_ylabels(panels)
    save_figure(figure, path)


def plot_optimizer(
    path: str | os.PathLike[str],
    learning_rate: tuple[np.ndarray, np.ndarray],
    gradient_norm: tuple[np.ndarray, np.ndarray],
) -> None:
    """Draw learning rate and gradient norm above each other.

    Args:
        path: The PNG file.
        learning_rate: Steps and values.
        gradient_norm: Steps and values, before clipping.
    """
    figure, (above, below) = figure_of_panels(width=9.5, height=5.0, rows=2)
    above.plot(*learning_rate, color=BLUE, linewidth=1.8)
    above.set_ylabel("learning rate")
    above.set_ylim(bottom=0.0)
    above.tick_params(labelbottom=False)
    steps, norm = gradient_norm
    below.plot(steps, norm, color=BLUE, alpha=0.3, linewidth=1.0)
    below.plot(steps, smooth(norm), color=BLUE, linewidth=1.8)
    if np.any(norm > 0):
        below.set_yscale("log")
        below.yaxis.set_major_formatter("{x:g}")
        below.yaxis.set_minor_locator(require("matplotlib.ticker").LogLocator(subs=(2.0, 5.0)))
        below.yaxis.set_minor_formatter("{x:g}")
    below.set_ylabel("gradient norm")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.margins(x=0.01)
    save_figure(figure, path)


def plot_rewards(
    path: str | os.PathLike[str],
    reward: tuple[np.ndarray, np.ndarray],
    solved: tuple[np.ndarray, np.ndarray],
    length: tuple[np.ndarray, np.ndarray],
) -> None:
    """Draw the rewards of a run on its own answers above the length of these.

    Args:
        path: The PNG file.
        reward: Steps and mean rewards, 0 to 1.
        solved: Steps and shares of the answers with reward 1.
        length: Steps and mean tokens of an answer.
    """
    figure, (above, below) = figure_of_panels(width=9.5, height=5.0, rows=2)
    drawn = ((above, reward, BLUE, "reward"), (above, solved, ORANGE, "solved"))
    for axes, (steps, values), color, label in (*drawn, (below, length, GRAY, "length")):
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1.0)
        axes.plot(steps, smooth(values), color=color, linewidth=1.8, label=label)
        axes.margins(x=0.01)
    above.set_ylim(0.0, 1.0)
    above.set_ylabel("mean over answers")
    above.legend(loc="best", frameon=False)
    above.tick_params(labelbottom=False)
    below.set_ylim(bottom=0.0)
    below.set_ylabel("tokens of an answer")
    below.set_xlabel("step")
    save_figure(figure, path)


def figure_of_panels(
    width: float,
    height: float,
    rows: int = 1,
    columns: int = 1,
    widths: Sequence[float] | None = None,
) -> tuple[Any, list[Any]]:
    """Return a figure in the common style and its panels, row by row.

    Args:
        width: Inches.
        height: Inches.
        rows: Panels above each other.
        columns: Panels side by side.
        widths: Of the columns, relative to each other.
    """
    figure = require("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, width_ratios=widths).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, panels


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Replace a PNG file by the figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    replace_file(path, buffer.getvalue())


def _times(factor: float) -> Any:
    return lambda value: value * factor
