# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The live view of a run on a terminal, and the choice between it and the plain line.

    step 120/300 ---------------               40%   0:31 elapsed   eta 0:58
    loss 3.2140   held out 1.823 bits/byte   lr 8.10e-03   grad norm 0.412   12.4k tokens/s
    L0 ########   L1 ########   L2 ########   L3 ########
    max violation 0.31 in layer 3   dead 0 of 32   dropped 0%   balance 1.02

One cell per expert, its height the load over the fair share (full at twice the share): green from
half to one and a half of it, yellow beyond, red over twice and under a tenth. A red x is an expert
without a token; `dead` counts them over all layers. Rows of many experts share cells, and a cell
then shows the worst of its experts; of many layers some are shown. Drawing is `rich`'s; what is
logged or printed meanwhile appears above the view.

The cursor is never hidden, and no terminal mode is changed: whatever ends the process, the
terminal needs no repair.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TextIO

import numpy as np

from jaxmoe.optional import MissingPackageError, require
from jaxmoe.tracking.console import (
    ConsoleTracker,
    LastingStream,
    TimeLeft,
    format_count,
    format_duration,
)
from jaxmoe.tracking.smoothing import worst_of_groups
from jaxmoe.tracking.tracker import (
    BITS_PER_BYTE,
    BITS_PER_TOKEN,
    DROPPED_FRACTION,
    GRADIENT_NORM,
    LEARNING_RATE,
    LOAD_BALANCE,
    LOSS,
    MFU,
    TOKENS_PER_SECOND,
    NullTracker,
    Tracker,
)

logger = logging.getLogger(__name__)

ConsoleKind = Literal["auto", "rich", "plain", "none"]

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
DEAD = "x"
MAX_CELLS = 64
"""Cells of one layer; more experts share cells."""
MAX_LINES = 8
"""Lines of the load strip."""


class Console(Tracker, Protocol):
    """Tracker that shows progress to a person."""

    def start(self, step: int) -> None:
        """Called before the first step, with the steps already done."""
        ...

    def show(self, metrics: Mapping[str, float], load: np.ndarray | None = None) -> None:
        """Show numbers and the load [L E] until the next report."""
        ...


class SilentConsole(NullTracker):
    """Shows nothing: for other processes, and for `none`."""

    def start(self, step: int) -> None:
        """Do nothing."""

    def show(self, metrics: Mapping[str, float], load: np.ndarray | None = None) -> None:
        """Do nothing."""


def open_console(kind: ConsoleKind, total_steps: int, stream: TextIO | None = None) -> Console:
    """Return the console for a stream.

    Args:
        kind: "auto": live on a terminal outside of CI, a line elsewhere.
        total_steps: Of the whole run.
        stream: Where to; standard output if None.

    Raises:
        MissingPackageError: If "rich" was asked for and is not installed.
        ValueError: If "rich" was asked for and the stream cannot take its characters.
    """
    out = stream or sys.stdout
    if kind == "none" or out is None:  # a process without standard output
        return SilentConsole()
    if kind == "plain" or (kind == "auto" and not is_watched(out)):
        return ConsoleTracker(total_steps, stream)
    if not _is_unicode(out):
        encoding = getattr(out, "encoding", None)
        raise ValueError(
            f"tracking.console=rich needs a UTF-8 terminal, and this one is {encoding}: set"
            " PYTHONIOENCODING=utf-8, or tracking.console to plain"
        )
    try:
        return LiveTracker(total_steps, stream)
    except MissingPackageError as error:
        if kind == "rich":
            raise
        logger.warning("%s; until then progress is a line at a time", error)
        return ConsoleTracker(total_steps, stream)


def is_watched(stream: TextIO, environment: Mapping[str, str] | None = None) -> bool:
    """Return whether the stream is a terminal that can redraw."""
    environment = os.environ if environment is None else environment
    return (
        stream.isatty()
        and _is_unicode(stream)
        and environment.get("TERM", "dumb") not in ("dumb", "unknown")
        and not environment.get("CI")
    )


class LiveTracker(NullTracker):
    """The live view.

    Args:
        total_steps: Of the whole run.
        stream: Where to; standard output if None.
        clock: Seconds, rising; tests bring their own.
        width: Columns; those of the terminal if None.

    Raises:
        MissingPackageError: If rich is not installed.
    """

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        width: int | None = None,
    ):
        self._live_module = require("rich.live")
        console = require("rich.console")
        self._text = require("rich.text").Text
        self._group = console.Group
        self._console = console.Console(
            file=LastingStream(stream), force_terminal=True, width=width, highlight=False
        )
        self._clock, self._left = clock, TimeLeft(total_steps, clock)
        self._view = TerminalView(total_steps=total_steps)
        self._live: Any = None
        self._began = clock()
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []

    def start(self, step: int) -> None:
        """Draw the view, which then stays at the bottom of the terminal."""
        if self._live is not None:
            return
        self._view.step = self._view.first_step = step
        self._began = self._clock()
        self._live = self._live_module.Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        self._console.show_cursor(True)
        # Handlers keep the stream that they were made with, past the one that Live puts there.
        for handler in logging.root.handlers:
            if type(handler) is logging.StreamHandler and handler.stream is sys.__stderr__:
                if sys.stderr is not sys.__stderr__:
                    self._moved.append((handler, handler.setStream(sys.stderr)))
        self._draw()

    def show(self, metrics: Mapping[str, float], load: np.ndarray | None = None) -> None:
        """Show numbers and the load [L E] at the next drawing."""
        self._view.metrics.update(metrics)
        if load is not None:
            self._view.load = np.asarray(load)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Redraw; metrics that are missing keep their last value."""
        self.start(step)
        self._view.step = step
        self._view.metrics.update(metrics)
        self._view.seconds_left = self._left.at(step)
        self._draw()

    def log_text(self, step: int, name: str, text: str) -> None:
        """Write the text above the view."""
        style = "yellow" if name == "warning" else ""
        self._console.print(self._text(f"{name} at step {step}: {text}", style=style))

    def close(self) -> None:
        """Keep the last view and restore the terminal."""
        if self._live is None:
            return
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved.clear()
        self._view.seconds_left = None
        self._draw()
        self._live.stop()
        self._live = None

    def _draw(self) -> None:
        self._view.seconds_gone = self._clock() - self._began
        lines = self._view.lines(self._console.width)
        texts = [self._text.assemble(*line, no_wrap=True, overflow="crop") for line in lines]
        self._live.update(self._group(*texts), refresh=True)


Span = tuple[str, str]
"""Text and its style."""


@dataclasses.dataclass(kw_only=True)
class TerminalView:
    """Content of the live view as lines of styled text, independent of rich."""

    total_steps: int
    first_step: int = 0
    step: int = 0
    seconds_gone: float = 0.0
    seconds_left: float | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    load: np.ndarray | None = None

    def lines(self, width: int) -> list[list[Span]]:
        """Return the view for a terminal of a width."""
        lines = [self._progress(width), *self._numbers(width)]
        if self.load is not None and self.load.size:
            lines += strip(self.load, width)
            lines += self._router(width)
        return lines

    def _progress(self, width: int) -> list[Span]:
        share = min(1.0, self.step / max(self.total_steps, 1))
        before = f"step {self.step}/{self.total_steps} "
        after = f" {share:4.0%}   {format_duration(self.seconds_gone)} elapsed"
        if self.seconds_left is not None:
            after += f"   eta {format_duration(self.seconds_left)}"
        length = max(0, min(48, width - len(before) - len(after) - 12))
        done = round(share * length)
        return [
            (before, "bold"),
            ("\u2501" * done, "green" if share == 1.0 else "cyan"),
            ("\u2501" * (length - done), "bright_black"),
            (after, ""),
        ]

    def _numbers(self, width: int) -> list[list[Span]]:
        metrics = self.metrics
        if LOSS not in metrics:
            return [[("compiled; the first steps are under way", "bright_black")]]
        held_out = BITS_PER_BYTE
        unit = " bits/byte"
        if held_out not in metrics:
            held_out = BITS_PER_TOKEN
            unit = " bits/token"
        spelled = [
            ("loss", LOSS, "{:.4f}".format, ""),
            ("held out", held_out, "{:.4f}".format, unit),
            ("lr", LEARNING_RATE, "{:.2e}".format, ""),
            ("grad norm", GRADIENT_NORM, "{:.3g}".format, ""),
            ("", TOKENS_PER_SECOND, format_count, " tokens/s"),
            ("mfu", MFU, "{:.1%}".format, ""),
        ]
        return _wrap(
            [
                [(f"{label} " if label else "", "bright_black"), (spell(metrics[name]), "bold")]
                + ([(unit, "bright_black")] if unit else [])
                for label, name, spell, unit in spelled
                if name in metrics
            ],
            width,
        )

    def _router(self, width: int) -> list[list[Span]]:
        assert self.load is not None
        ratio = self.load * self.load.shape[-1]
        worst = int(ratio.max(-1).argmax())
        violation = max(float(ratio.max()) - 1.0, 0.0)  # a batch of padding routes nothing
        style = "red" if violation > 1.0 else "yellow" if violation > 0.5 else "green"
        items: list[list[Span]] = [
            [
                ("max violation ", "bright_black"),
                (f"{violation:.2f}", style),
                (f" in layer {worst}" if len(ratio) > 1 else "", "bright_black"),
            ]
        ]
        dead = int(np.sum(~(self.load > 0.0)))
        style = "red" if dead else "green"
        items.append([("dead ", "bright_black"), (f"{dead} of {self.load.size}", style)])
        if DROPPED_FRACTION in self.metrics:
            value = self.metrics[DROPPED_FRACTION]
            style = "red" if value > 0.0 else "green"
            items.append([("dropped ", "bright_black"), (f"{value:.1%}", style)])
        if LOAD_BALANCE in self.metrics:
            items.append([("balance ", "bright_black"), (f"{self.metrics[LOAD_BALANCE]:.3f}", "")])
            items[-1].append((" (1 = uniform)", "bright_black"))
        return _wrap(items, width)


def strip(load: np.ndarray, width: int) -> list[list[Span]]:
    """Return the load of every expert as rows of cells, several layers to a line where they fit.

    Args:
        load: [L E] shares of the assignments of each layer.
        width: Columns.

    Returns:
        At most `MAX_LINES` lines of pieces, and below them what was left out or put together.
    """
    layers, experts = load.shape
    ratio = worst_of_groups(load * experts, min(MAX_CELLS, max(1, width - 6)))
    label = len(f"L{layers - 1} ")
    per_line = max(1, (width + 3) // (label + ratio.shape[1] + 3))
    allowed = MAX_LINES * per_line
    shown = range(layers)
    if layers > allowed:
        shown = sorted({round(i * (layers - 1) / (allowed - 1)) for i in range(allowed)})
    lines: list[list[Span]] = []
    for place, layer in enumerate(shown):
        if place % per_line == 0:
            lines.append([])
        else:
            lines[-1].append(("   ", ""))
        lines[-1].append((f"L{layer}".ljust(label), "bright_black"))
        lines[-1] += [cell(value) for value in ratio[layer]]
    notes = []
    if len(shown) < layers:
        notes.append(f"{len(shown)} of {layers} layers")
    if ratio.shape[1] < experts:
        notes.append(f"{experts} experts, a cell is the worst of {-(-experts // ratio.shape[1])}")
    return lines + _wrap([[(note, "bright_black")] for note in notes], width)


def cell(ratio: float) -> Span:
    """Return the character and colour of one expert; its height is the load over the fair share."""
    if not ratio > 0.0:
        return (DEAD, "red")
    block = BLOCKS[min(len(BLOCKS) - 1, int(ratio * len(BLOCKS) / 2.0))]
    if not 0.1 <= ratio <= 2.0:
        return (block, "red")
    return (block, "green" if 0.5 <= ratio <= 1.5 else "yellow")


def _wrap(items: list[list[Span]], width: int) -> list[list[Span]]:
    """Return items three columns apart, in as many lines as they need."""
    lines: list[list[Span]] = []
    width_used = 0
    for item in items:
        length = sum(len(text) for text, _ in item)
        if lines and width_used + 3 + length <= width:
            lines[-1].append(("   ", ""))
            width_used += 3
        else:
            lines.append([])
            width_used = 0
        lines[-1] += item
        width_used += length
    return lines


def _is_unicode(stream: TextIO) -> bool:
    return "utf" in (getattr(stream, "encoding", None) or "utf-8").lower()
