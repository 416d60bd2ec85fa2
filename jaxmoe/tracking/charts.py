# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Line charts as inline SVG: for pages that are light or dark, on any screen and on paper.

Colours are the page's (`html_page.STYLE`: classes c0 to c7, axis, grid, reference), so that one
picture serves both themes. At most about 600 points of a curve are drawn, its spikes among them.
Pictures as files are in `plots.py`.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from jaxmoe.tracking.smoothing import smooth, thinned

COLORS = 8
"""Classes c0, c1, ... of the page; more curves begin again."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 12, 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A curve of a chart."""

    label: str
    """In the legend; empty: not there."""
    x: np.ndarray
    y: np.ndarray
    color: int = 0
    kind: Literal["line", "faint", "dots"] = "line"
    """faint: the raw numbers behind a smoothed curve; dots: with a mark at every point."""


def with_smoothed(label: str, x: np.ndarray, y: np.ndarray, color: int = 0) -> list[Line]:
    """A noisy curve, faint, and its smoothed form before it."""
    return [
        Line(label="", x=x, y=y, color=color, kind="faint"),
        Line(label=label, x=x, y=smooth(y), color=color),
    ]


def plain_number(value: float) -> str:
    """A number on an axis, as short as it can be."""
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
    size: tuple[int, int] = (480, 230),
    spell_x: Callable[[float], str] = plain_number,
) -> str:
    """A chart with its legend, as HTML.

    Args:
        lines: Curves; what is not finite (not positive, on a logarithmic axis) is a gap.
        y_label: Above the vertical axis.
        x_label: Below the horizontal one.
        references: Horizontal lines by label.
        is_log: A logarithmic vertical axis.
        from_zero: The vertical axis begins at 0.
        size: Width and height of the picture, in its own units; it grows with the page.
        spell_x: Spells the numbers of the horizontal axis.

    Returns:
        A `figure` element; a sentence instead of the picture if there is nothing to draw.
    """
    references = dict(references or {})
    curves = []
    for line in lines:
        x, y = thinned(np.asarray(line.x, float), np.asarray(line.y, float))
        curves.append((line, x, np.where((y > 0) if is_log else np.isfinite(y), y, np.nan)))
    values = np.concatenate([y for _, _, y in curves] + [np.array([*references.values()])])
    values = values[np.isfinite(values)]
    xs = np.concatenate([x[np.isfinite(y)] for _, x, y in curves] or [np.zeros(0)])
    if not len(xs) or not len(values):
        return f'<figure><p class="soft">{_escape(y_label)}: nothing was recorded</p></figure>'
    frame = _Frame.around(xs, values, is_log=is_log, from_zero=from_zero, size=size)
    parts = [frame.axes(x_label, y_label, spell_x)]
    parts += [_reference_lines(frame, references)]
    # Faint ones first, so that no raw curve hides another's smoothed one.
    for line, x, y in sorted(curves, key=lambda curve: curve[0].kind != "faint"):
        parts.append(_curve(frame, line, x, y))
    width, height = size
    picture = (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{_escape(y_label)} by'
        f' {_escape(x_label)}">{"".join(parts)}</svg>'
    )
    return f"<figure>{_legend(lines)}{picture}</figure>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Frame:
    """From numbers to places in the picture."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    is_log: bool
    size: tuple[int, int]

    @classmethod
    def around(
        cls,
        xs: np.ndarray,
        values: np.ndarray,
        *,
        is_log: bool,
        from_zero: bool,
        size: tuple[int, int],
    ) -> _Frame:
        low, high = float(values.min()), float(values.max())
        if is_log:
            low, high = math.log10(low), math.log10(high)
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
        bottom = 0.0 if from_zero and not is_log and low >= 0.0 else low - margin
        left, right = float(xs.min()), float(xs.max())
        if right <= left:
            left, right = left - 0.5, right + 0.5
        return cls(x_range=(left, right), y_range=(bottom, high + margin), is_log=is_log, size=size)

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (self.size[0] - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        place = ((math.log10(value) if self.is_log else value) - low) / (high - low)
        return self.size[1] - _BOTTOM - place * (self.size[1] - _TOP - _BOTTOM)

    def axes(self, x_label: str, y_label: str, spell_x: Callable[[float], str]) -> str:
        width, height = self.size
        base = height - _BOTTOM
        parts = []
        for tick in self._y_ticks():
            y = self.y(tick)
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{width - _RIGHT}"/>')
            parts.append(_text(_LEFT - 7, y + 3.5, plain_number(tick), "end"))
        for tick in _ticks(*self.x_range, max(3, (width - 100) // 90)):
            x = self.x(tick)
            anchor = "end" if x > width - _RIGHT - 20 else "middle"  # no label out of the picture
            parts.append(_text(x + 12 * (anchor == "end"), base + 16, spell_x(tick), anchor))
        parts.append(f'<path class="axis" d="M{_LEFT} {base}H{width - _RIGHT}"/>')
        middle = (_LEFT + width - _RIGHT) / 2
        parts.append(_text(middle, height - 6, x_label, "middle"))
        turned = f'transform="rotate(-90 12 {(_TOP + base) / 2:.0f})"'
        parts.append(_text(12, (_TOP + base) / 2, y_label, "middle", turned))
        return "".join(parts)

    def _y_ticks(self) -> list[float]:
        low, high = self.y_range
        count = max(3, (self.size[1] - 50) // 45)
        if not self.is_log:
            return _ticks(low, high, count)
        for factors in ((1.0, 2.0, 5.0), (1.0,)):
            powers = range(math.floor(low), math.ceil(high) + 1)
            ticks = [factor * 10.0**power for power in powers for factor in factors]
            ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
            if len(ticks) <= 2 * count:
                break
        ticks = ticks[:: max(1, len(ticks) // (2 * count))]
        return ticks or [10.0 ** ((low + high) / 2)]


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers between two."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _curve(frame: _Frame, line: Line, x: np.ndarray, y: np.ndarray) -> str:
    commands, is_down = [], False
    for place, value in zip(x, y, strict=True):
        if not math.isfinite(value):
            is_down = False
            continue
        commands.append(f"{'L' if is_down else 'M'}{frame.x(place):.1f} {frame.y(value):.1f}")
        is_down = True
    color = f"c{line.color % COLORS}"
    faint = " faint" if line.kind == "faint" else ""
    parts = [f'<path class="curve {color}{faint}" d="{"".join(commands)}"/>']
    if line.kind == "dots" or len(commands) == 1:
        label = f"{line.label} " if line.label else ""
        parts += [
            f'<circle class="{color}" cx="{frame.x(place):.1f}" cy="{frame.y(value):.1f}" r="3">'
            f"<title>{_escape(f'{label}{value:.4g} at {place:,.0f}')}</title></circle>"
            for place, value in zip(x, y, strict=True)
            if math.isfinite(value)
        ]
    return "".join(parts)


def _reference_lines(frame: _Frame, references: Mapping[str, float]) -> str:
    """Dashed lines with labels where a falling curve is not: low ones left, high ones right."""
    width, height = frame.size
    middle, parts, labels = height / 2, [], []
    at = {True: math.inf, False: math.inf}
    for label, value in sorted(references.items(), key=lambda pair: pair[1]):
        if frame.is_log and value <= 0:
            continue
        y = frame.y(value)
        is_low = y > middle
        at[is_low] = min(y - 4, at[is_low] - 14)  # labels of close lines move apart
        place, anchor = (_LEFT + 6, "start") if is_low else (width - _RIGHT - 4, "end")
        parts.append(f'<path class="reference" d="M{_LEFT} {y:.1f}H{width - _RIGHT}"/>')
        label = f"{label} {value:.3g}"
        labels.append(_text(place, at[is_low], label, anchor, 'class="reference"'))
    return "".join([*parts, *labels])  # no line through a label


def _legend(lines: Sequence[Line]) -> str:
    named = [line for line in lines if line.label]
    if not named:
        return ""
    items = "".join(
        f'<span><i class="c{line.color % COLORS}"></i>{_escape(line.label)}</span>'
        for line in named
    )
    return f'<figcaption class="legend">{items}</figcaption>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{_escape(text)}</text>'


def _escape(text: object) -> str:
    return html.escape(str(text))
