# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`LinkHook`: measures the links during a run and reports devices and links that stay slow.

A window is one probe. A fault is reported when `locate` has found it in `windows` windows in a row,
or in `windows_if_large` if its margin is large; once, until it has recovered. A device that is not
to blame for a slow step shows here: `jaxmoe.resilience.stragglers` sees processes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from jaxmoe.contrib.survival.links.faults import (
    Fault,
    LinkMatrix,
    LinkRule,
    SlowLink,
    in_words,
    locate,
    slowness,
)
from jaxmoe.contrib.survival.links.probe import LinkProbe
from jaxmoe.training.state import TrainState

PROBE_BYTES = 1 << 20
"""Bytes of the messages of the watch."""
SLOWEST = "links/slowest_ratio"
"""Metric: largest time of a message over that of its like."""


class LinkWatch:
    """Judges consecutive windows; every process reaches the same verdicts.

    Args:
        rule: Thresholds.
    """

    def __init__(self, rule: LinkRule | None = None):
        self._rule = rule or LinkRule()
        self._in_a_row: dict[tuple[str, int, int], int] = {}
        self._large_in_a_row: dict[tuple[str, int, int], int] = {}
        self._named: set[tuple[str, int, int]] = set()

    def window(self, matrix: LinkMatrix) -> list[Fault]:
        """Return the faults of this window that lasted long enough and are not named yet.

        Args:
            matrix: Times of one probe.
        """
        rule = self._rule
        faults = {_key(fault): fault for fault in locate(matrix, rule)}
        large = {key for key, fault in faults.items() if fault.ratio > rule.large}
        self._in_a_row = {key: self._in_a_row.get(key, 0) + 1 for key in faults}
        self._large_in_a_row = {key: self._large_in_a_row.get(key, 0) + 1 for key in large}
        lasting = {
            key
            for key in faults
            if self._in_a_row[key] >= rule.windows
            or self._large_in_a_row.get(key, 0) >= rule.windows_if_large
        }
        new = [fault for key, fault in faults.items() if key in lasting - self._named]
        self._named = lasting | (self._named & faults.keys())
        return new


def _key(fault: Fault) -> tuple[str, int, int]:
    if isinstance(fault, SlowLink):
        return fault.axis, fault.source, fault.target
    return "", fault.place, fault.place


def scalars_of(matrix: LinkMatrix) -> dict[str, float]:
    """Return the metrics of a window: slowest ratio, and median seconds by row.

    Args:
        matrix: Times of one probe.
    """
    residual, _ = slowness(matrix, LinkRule())
    medians = {
        f"links/{row}_seconds": float(np.nanmedian(seconds))
        for row, seconds in zip(matrix.rows, matrix.seconds, strict=True)
    }
    return {SLOWEST: math.exp(float(np.nanmax(residual)))} | medians


class LinkHook:
    """Measures the links every few steps; every process must have it.

    Args:
        make_probe: Returns the probe; called at the first window, so that a run that ends before
            compiles nothing.
        every: Steps between windows.
        report: Called with the step and the text of each fault.
        log: Called with the step and the metrics of each window.
        rule: Thresholds.
    """

    def __init__(
        self,
        make_probe: Callable[[], LinkProbe],
        *,
        every: int,
        report: Callable[[int, object], None],
        log: Callable[[int, Mapping[str, float]], None],
        rule: LinkRule | None = None,
    ):
        self._make_probe = make_probe
        self._probe = None
        self._every = every
        self._report = report
        self._log = log
        self._watch = LinkWatch(rule)

    def is_due(self, step: int) -> bool:
        """Return whether `step` is a multiple of `every`."""
        return step % self._every == 0

    def run(self, step: int, state: TrainState | None) -> None:
        """Measure, log, and report what has been slow for long enough."""
        if self._probe is None:
            self._probe = self._make_probe()
        matrix = self._probe.measure()
        self._log(step, scalars_of(matrix))
        devices = list(self._probe.mesh.devices.flat)
        process_of = {device.id: device.process_index for device in devices}
        numbers = [device.id for device in devices]
        for text in in_words(self._watch.window(matrix), numbers, process_of):
            self._report(step, text)
