# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the progress line of a run to standard output."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import numpy as np

from jaxmoe.tracking.tracker import (
    ANSWER_LENGTH,
    BITS_PER_BYTE,
    CLIPPED,
    DIVERGENCE,
    GRADIENT_NORM,
    LEARNING_RATE,
    LOSS,
    MAX_VIOLATION,
    MFU,
    REPLAYED,
    REWARD,
    ROLLOUT_SECONDS,
    SOLVED,
    STALE,
    SYNC_BYTES,
    SYNC_SHARE,
    TOKENS_PER_SECOND,
    TRAIN_SECONDS,
    NullTracker,
)

logger = logging.getLogger(__name__)

SIZES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def format_count(value: int | float) -> str:
    """Return a number in three or four digits: 987, 12.4k, 3.91M, 1.07B."""
    for size, letter in SIZES:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def format_flops(value: int | float) -> str:
    """Return operations with unit prefixes: 12.5 GFLOP."""
    number = format_count(value).replace("B", "G")
    return f"{number} FLOP" if number[-1].isdigit() else f"{number[:-1]} {number[-1]}FLOP"


def format_bytes(value: int | float) -> str:
    """Return bytes with decimal unit prefixes: 1.63 GB."""
    number = format_count(value).replace("B", "G")
    return f"{number} B" if number[-1].isdigit() else f"{number[:-1]} {number[-1]}B"


def format_duration(seconds: float) -> str:
    """Return a time as `m:ss` or `h:mm:ss`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class TimeLeft:
    """Estimates the seconds until the last step from the pace since the first report.

    Args:
        total_steps: Of the whole run.
        clock: Seconds, rising.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float]):
        self._total_steps = total_steps
        self._clock = clock
        self._start: tuple[int, float] | None = None

    def at(self, step: int) -> float | None:
        """Return the seconds left after a step; None before there is a pace, and at the end."""
        now = self._clock()
        if self._start is None:
            self._start = (step, now)
        first_step, first_time = self._start
        if step <= first_step or step >= self._total_steps:
            return None
        return (now - first_time) / (step - first_step) * (self._total_steps - step)


def is_gone(error: OSError) -> bool:
    """Return whether the reader of a pipe is gone, or a terminal was closed."""
    return isinstance(error, BrokenPipeError) or error.errno in (errno.EPIPE, errno.EIO)


def why_not_written(error: OSError) -> str:
    """Return why standard output cannot be written, as a clause."""
    if is_gone(error):
        return "standard output has no reader"
    return f"standard output cannot be written ({error.strerror or error})"


class LastingStream:
    """Stream that drops its output after an error, such as a reader that is gone or a full disk.

    Args:
        stream: Where to; standard output if None.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream: Any = stream or sys.stdout or io.StringIO()
        self._is_mute = False

    def write(self, text: str) -> int:
        """Write, unless an earlier write failed."""
        with self._while_read():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, unless an earlier write failed."""
        with self._while_read():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _while_read(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._is_mute:
                self._is_mute = True
                logger.warning("%s: the run goes on without progress", why_not_written(error))


FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", REWARD, "{:.3f}".format),
    ("solved", SOLVED, "{:.0%}".format),
    ("kl", DIVERGENCE, "{:.3g}".format),
    ("clipped", CLIPPED, "{:.1%}".format),
    ("length", ANSWER_LENGTH, "{:.1f}".format),
    ("replayed", REPLAYED, "{:.0%}".format),
    ("loss", LOSS, "{:.4f}".format),
    ("bpb", BITS_PER_BYTE, "{:.4f}".format),
    ("lr", LEARNING_RATE, "{:.2e}".format),
    ("grad_norm", GRADIENT_NORM, "{:.3g}".format),
    ("tokens/s", TOKENS_PER_SECOND, format_count),
    ("mfu", MFU, "{:.1%}".format),
    ("max_violation", MAX_VIOLATION, "{:.2f}".format),
    ("stale", STALE, "{:.0f}".format),
    ("sync", SYNC_SHARE, "{:.1%}".format),
    ("sync_bytes", SYNC_BYTES, format_bytes),
    ("rollout_s", ROLLOUT_SECONDS, "{:.2f}".format),
    ("train_s", TRAIN_SECONDS, "{:.2f}".format),
)


class ConsoleTracker(NullTracker):
    """Writes the progress line.

    Args:
        total_steps: Of the whole run, for `step=n/total` and the time left.
        stream: Where to; standard output if None.
        clock: Seconds, rising; tests bring their own.
    """

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total_steps = total_steps
        self._stream = LastingStream(stream)
        self._left = TimeLeft(total_steps, clock)
        self._held_out: dict[str, float] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line; the latest held-out result is repeated until the next one."""
        if BITS_PER_BYTE in metrics:
            self._held_out = {BITS_PER_BYTE: metrics[BITS_PER_BYTE]}
        values = self._held_out | dict(metrics)
        width = len(f"step={self._total_steps}/{self._total_steps}")
        pairs = [f"step={step}/{self._total_steps}".ljust(width)]
        pairs += [f"{key}={spell(values[name])}" for key, name, spell in FIELDS if name in values]
        if (seconds_left := self._left.at(step)) is not None:
            pairs.append(f"eta={format_duration(seconds_left)}")
        self._write_line(" ".join(pairs))

    def log_text(self, step: int, name: str, text: str) -> None:
        """Write a text after its name, or below it if it has several lines."""
        between = "\n" if "\n" in text else " "
        self._write_line(f"{name} at step {step}:{between}{text}")

    def start(self, step: int) -> None:
        """Do nothing."""

    def show(self, metrics: Mapping[str, float], load: np.ndarray | None = None) -> None:
        """Do nothing: the line does not show the load."""

    def close(self) -> None:
        """Do nothing."""

    def _write_line(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()
