# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws line charts for the HTML pages: matplotlib's SVG, in the colours of the page.

Colours are variables of the page (`html_page.STYLE`), so that one chart serves the light and the
dark theme. About 600 points of a curve are drawn, spikes included. `plots.py` draws PNG files with
the same panels.
"""

from __future__ import annotations

import dataclasses
import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxmoe.optional import require
from jaxmoe.tracking.plots import figure_of_panels
from jaxmoe.tracking.reference_lines import draw_references, loss_limits, note_cut_start
from jaxmoe.tracking.smoothing import smooth, thin_curve

COLORS = 8
"""Number of line colours of the page; further curves repeat them."""

_DPI = 72.0  # units of an SVG of matplotlib per inch
_FONT_SIZE = 11.0  # that the page sets
_VARIABLES = {f"#c0100{n}": f"var(--c{n})" for n in range(COLORS)} | {
    "#c02001": "var(--soft)",
    "#c02002": "var(--line)",
}
"""Placeholder colours of the figure, and the variable of the page that replaces each."""
_SOFT, _LINE = list(_VARIABLES)[COLORS:]

_CLEANING = (
    (r"<metadata>.*?</metadata>|<defs>\s*<(?:style|clipPath).*?</defs>|<!--.*?-->", ""),
    (r' (?:xmlns(?::xlink)?|clip-path|version)="[^"]*"| (?:width|height)="[\d.]+pt"', ""),
    (r"(?<=style=\")font-size: [^;]*; font-family: [^;]*; ", ""),
    (r'<g id="(line|faint|dots) ', r'<g class="curve \1 '),
    (r'<g id="reference', '<g class="reference'),
    (r' id="(?!m[0-9a-f]{10}")[^"]*"', ""),
    (r"\s+", " "),
    (r"> <", "><"),
)
"""Patterns removed from the SVG or replaced: sizes, fonts and names that the page sets itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One curve of a chart."""

    label: str
    """Entry of the legend; empty for none."""
    x: np.ndarray
    y: np.ndarray
    color: int = 0
    kind: Literal["line", "faint", "dots"] = "line"
    """faint: raw values behind a smoothed curve; dots: a marker at every point."""


def with_smoothed(label: str, x: np.ndarray, y: np.ndarray, color: int = 0) -> list[Line]:
    """Return a faint curve of the raw values and a curve of the smoothed ones."""
    return [
        Line(label="", x=x, y=y, color=color, kind="faint"),
        Line(label=label, x=x, y=smooth(y), color=color),
    ]


def plain_number(value: float) -> str:
    """Return the shortest spelling of a number for an axis."""
    if value != 0.0 and not 1e-3 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.6g}"


def line_chart(
    lines: Sequence[Line],
    *,
    y_label: str,
    x_label: str = "step",
    references: Mapping[str, float] | None = None,
    is_log: bool = False,
    from_zero: bool = False,
    is_loss: bool = False,
    size: tuple[int, int] = (480, 230),
    spell_x: Callable[[float], str] = plain_number,
) -> str:
    """Return a chart with its legend, as HTML.

    Args:
        lines: Curves; values that are not finite (not positive, on a log axis) are gaps.
        y_label: Label of the vertical axis.
        x_label: Label of the horizontal axis.
        references: Horizontal lines by label.
        is_log: Whether the vertical axis is logarithmic.
        from_zero: Whether the vertical axis begins at 0.
        is_loss: Whether the first steps may leave the vertical axis.
        size: Width and height in CSS pixels at the natural size; the chart scales with the page.
        spell_x: Formats the ticks of the horizontal axis.

    Returns:
        A `figure` element; a sentence instead of the chart if there is nothing to draw.
    """
    references = {
        label: value for label, value in (references or {}).items() if value > 0 or not is_log
    }
    curves = []
    for line in lines:
        x, y = thin_curve(np.asarray(line.x, float), np.asarray(line.y, float))
        curves.append((line, x, np.where((y > 0) if is_log else np.isfinite(y), y, np.nan)))
    values = np.concatenate([y for _, _, y in curves] + [np.array([*references.values()])])
    if not any(np.isfinite(y).any() for _, _, y in curves):
        return f'<figure><p class="soft">{html.escape(y_label)}: nothing was recorded</p></figure>'
    figure, (axes,) = figure_of_panels(width=size[0] / _DPI, height=size[1] / _DPI)
    # Faint curves first, so that none covers a smoothed one.
    for line, x, y in sorted(curves, key=lambda curve: curve[0].kind != "faint"):
        _draw(axes, line, x, y)
    if is_log:
        axes.set_yscale("log")
    drawn = [(x, y) for _, x, y in curves]
    limits = _limits(values[np.isfinite(values)], is_log=is_log, from_zero=from_zero)
    axes.set_ylim(*(loss_limits(drawn, references) or limits) if is_loss else limits)
    axes.margins(x=0.02)
    draw_references(axes, references, curves=drawn, color=_SOFT, size=_FONT_SIZE)
    if is_loss:
        note_cut_start(axes, drawn[0], _SOFT, _FONT_SIZE)
    _style(axes, x_label, y_label, spell_x, is_log=is_log)
    return f"<figure>{_legend(lines)}{_svg(figure, f'{y_label} by {x_label}')}</figure>"


def _draw(axes: Any, line: Line, x: np.ndarray, y: np.ndarray) -> None:
    """Add one curve; single points between gaps get a marker."""
    color = f"#c0100{line.color % COLORS}"
    is_faint = line.kind == "faint"
    finite = np.concatenate([[False], np.isfinite(y), [False]])
    alone = finite[1:-1] & ~finite[:-2] & ~finite[2:]
    marked = np.isfinite(y) if line.kind == "dots" else alone
    axes.plot(
        x,
        y,
        color=color,
        linewidth=1.0 if is_faint else 1.8,
        alpha=0.35 if is_faint else 1.0,
        marker="o",
        markersize=5.0,
        markevery=np.flatnonzero(marked).tolist(),
        gid=f"{line.kind} c{line.color % COLORS}",
    )


def _limits(values: np.ndarray, *, is_log: bool, from_zero: bool) -> tuple[float, float]:
    """Return the range of the vertical axis with a margin of 6 %."""
    low = float(values.min())
    high = float(values.max())
    if is_log:
        low = math.log10(low)
        high = math.log10(high)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    bottom = 0.0 if from_zero and not is_log and low >= 0.0 else low - margin
    top = high + margin
    return (10.0**bottom, 10.0**top) if is_log else (bottom, top)


def _style(
    axes: Any, x_label: str, y_label: str, spell_x: Callable[[float], str], *, is_log: bool
) -> None:
    """Set labels, ticks and colours."""
    ticker = require("matplotlib.ticker")
    axes.set_xlabel(x_label, color=_SOFT)
    axes.set_ylabel(y_label, color=_SOFT, labelpad=9)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins="auto", steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: spell_x(value))
    axes.yaxis.set_major_formatter(lambda value, _: plain_number(value))
    if is_log:
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.tick_params(colors=_SOFT, labelsize=9, length=0)
    axes.grid(visible=True, axis="y", color=_LINE, linewidth=0.8)
    axes.grid(visible=False, axis="x")
    axes.spines[["left"]].set_visible(False)
    axes.spines["bottom"].set_color(_SOFT)


def _svg(figure: Any, label: str) -> str:
    """Return the figure as an inline SVG element without fixed size or embedded style."""
    matplotlib = require("matplotlib")
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    picture = buffer.getvalue()
    picture = picture[picture.index("<svg") :]
    for pattern, new in _CLEANING:
        picture = re.sub(pattern, new, picture, flags=re.DOTALL)
    for placeholder, variable in _VARIABLES.items():
        picture = picture.replace(placeholder, variable)
    return picture.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def _legend(lines: Sequence[Line]) -> str:
    labelled = [line for line in lines if line.label]
    if not labelled:
        return ""
    items = "".join(
        f'<span><i class="c{line.color % COLORS}"></i>{html.escape(line.label)}</span>'
        for line in labelled
    )
    return f'<figcaption class="legend">{items}</figcaption>'
