# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`locate`: names slow devices and links from the times of messages between neighbours.

Column d of the matrix is device d. Row 0 is what d does alone (a copy), every other row is a mesh
axis: the message of d to its next neighbour there. A message touches its two devices.

    residual   log time less the lower median of the messages of the same kind (row, and within
               a process, a host or between hosts); less the least of up to three
    spread     1.4826 x median of |residual| over the whole matrix; 0 for fewer than 12 messages,
               where the floor decides
    slow       residual > max(z x spread, log(ratio x (1 + 2 / messages of the same kind)))

A slow message is explained by a device or by its link. Until no device is left, the one with the
largest share of slow messages is named, and what it touches is set aside:

    device     is slow alone, or more than half of the messages that touch it are slow and they
               have more than one other end
    link       a slow message that touches no named device

So two devices with nothing but a link between them, both slow to each other and fast alone, give a
slow link in each direction. The lower median, as in `jaxmoe.resilience.stragglers`, keeps the rule
for two devices: the faster one is the norm.

After C4 (arXiv 2406.04594): collectives are regular, so a message that differs from its like is a
fault of the hardware. The thresholds are ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.planning.network.links import REACHES

ALONE = "alone"
"""Name of the row of what a device does without others."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinkRule:
    """Thresholds above which a message is slow."""

    z: float = 6.0
    """Spreads above the centre."""
    ratio: float = 1.5
    """Time over that of the centre, at least; three times as much for kinds of one message, twice
    for kinds of two."""
    windows: int = 3
    """Number of windows in a row."""
    large: float = 8.0
    """Time over that of the centre that counts as a large margin."""
    windows_if_large: int = 2
    """Number of windows in a row with a large margin."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkMatrix:
    """Times of messages between neighbours; places are columns."""

    rows: tuple[str, ...]
    """Mesh axis of each row; the first may be ALONE."""
    seconds: Float[np.ndarray, "R N"]
    """Times; NaN where there is no message."""
    targets: Int[np.ndarray, "R N"]
    """Column of the receiving device."""
    reaches: Int[np.ndarray, "R N"]
    """What the message crosses, by index of REACHES."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlowDevice:
    """A device whose messages are slow on all sides, or that is slow alone."""

    place: int
    """Column of the device."""
    ratio: float
    """Time of what it does alone, or median time of its messages, over that of its like."""
    is_slow_alone: bool
    """Whether it is slow without others as well; otherwise its connection is."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlowLink:
    """A slow message between devices that are not slow otherwise."""

    axis: str
    """Mesh axis."""
    source: int
    """Column of the sending device."""
    target: int
    """Column of the receiving device."""
    ratio: float
    """Time over that of its like."""


Fault = SlowDevice | SlowLink


_ENOUGH = 12
"""Messages from which on their spread is taken from them; a slow device is half of fewer."""


def slowness(
    matrix: LinkMatrix, rule: LinkRule
) -> tuple[Float[np.ndarray, "R N"], Bool[np.ndarray, "R N"]]:
    """Return the log of every time over the lower median of its like, and which are slow.

    Args:
        matrix: Times.
        rule: Thresholds.

    Returns:
        The residuals, NaN without a message, and whether each is above its threshold.
    """
    logs = np.log(matrix.seconds)
    ratios = np.full(matrix.seconds.shape, np.nan)
    floors = np.full(matrix.seconds.shape, np.inf)
    for row in range(len(matrix.rows)):
        for reach in range(len(REACHES)):
            like = np.isfinite(logs[row]) & (matrix.reaches[row] == reach)
            if like.any():
                values = np.sort(logs[row, like])
                middle = (len(values) - 1) // 2 if len(values) > 3 else 0
                ratios[row, like] = logs[row, like] - values[middle]
                floors[row, like] = np.log(rule.ratio * (1.0 + 2.0 / len(values)))
    values = np.abs(ratios[np.isfinite(ratios)])
    spread = 1.4826 * float(np.median(values)) if values.size >= _ENOUGH else 0.0
    return ratios, np.nan_to_num(ratios, nan=-np.inf) > np.maximum(rule.z * spread, floors)


def locate(matrix: LinkMatrix, rule: LinkRule | None = None) -> list[Fault]:
    """Return the slow devices, then the slow links, the slowest first.

    Args:
        matrix: Times of one measurement.
        rule: Thresholds.
    """
    residual, slow = slowness(matrix, rule or LinkRule())
    if not slow.any():
        return []
    number = matrix.seconds.shape[1]
    touching: list[list[tuple[int, int]]] = [[] for _ in range(number)]
    for row, column in np.argwhere(np.isfinite(residual)).tolist():
        for device in {column, int(matrix.targets[row, column])}:
            touching[device].append((row, column))
    devices: list[SlowDevice] = []
    suspects = {device for device in range(number) if any(slow[cell] for cell in touching[device])}
    explained: set[tuple[int, int]] = set()
    while suspects:
        ranked = []
        for device in suspects:
            cells = [cell for cell in touching[device] if cell not in explained]
            bad = [cell for cell in cells if slow[cell]]
            partners = {_other(matrix, cell, device) for cell in bad}
            alone = [cell for cell in bad if _other(matrix, cell, device) == device]
            if alone or (2 * len(bad) > len(cells) and len(partners) > 1):
                excess = float(np.median([residual[cell] for cell in alone or bad]))
                ranked.append((bool(alone), len(bad) / len(cells), excess, -device))
        if not ranked:
            break
        is_alone, _, excess, negative = max(ranked)
        devices.append(
            SlowDevice(place=-negative, ratio=float(np.exp(excess)), is_slow_alone=is_alone)
        )
        explained |= set(touching[-negative])
        suspects.remove(-negative)
    links = [
        SlowLink(
            axis=matrix.rows[row],
            source=column,
            target=int(matrix.targets[row, column]),
            ratio=float(np.exp(residual[row, column])),
        )
        for row, column in np.argwhere(slow).tolist()
        if (row, column) not in explained
    ]
    devices.sort(key=lambda device: -device.ratio)
    return [*devices, *sorted(links, key=lambda link: -link.ratio)]


def _other(matrix: LinkMatrix, cell: tuple[int, int], device: int) -> int:
    """Return the other end of a message; the device itself if it is alone."""
    row, column = cell
    target = int(matrix.targets[row, column])
    return target if column == device else column


def in_words(
    faults: Sequence[Fault], devices: Sequence[int], process_of: Mapping[int, int]
) -> list[str]:
    """Return a line for every fault; devices that are a whole process are one line.

    Args:
        faults: Result of `locate`.
        devices: Number of the device of each column.
        process_of: Process by number of the device.
    """
    slow = [fault for fault in faults if isinstance(fault, SlowDevice)]
    places = {fault.place for fault in slow}
    lines: list[str] = []
    for process in sorted({process_of[devices[place]] for place in places}):
        process_places = {
            place for place, device in enumerate(devices) if process_of[device] == process
        }
        local_faults = [fault for fault in slow if fault.place in process_places]
        if process_places <= places and len(process_places) < len(devices):
            numbers = ", ".join(str(devices[fault.place]) for fault in local_faults)
            lines.append(
                f"process {process} is slow: {_how(local_faults)}, on all of its devices"
                f" ({numbers});"
                f" to go on without it restart with launch --supervise --exclude {process}"
            )
            continue
        lines += [
            f"device {devices[fault.place]} of process {process} is slow: {_how([fault])}"
            for fault in local_faults
        ]
    for fault in faults:
        if isinstance(fault, SlowLink):
            source = devices[fault.source]
            target = devices[fault.target]
            lines.append(
                f"link {source} -> {target} on the axis {fault.axis} is slow: a message from"
                f" process {process_of[source]} to {process_of[target]} takes {fault.ratio:.1f}"
                " times as long as its like"
            )
    return lines


def _how(faults: Sequence[SlowDevice]) -> str:
    ratio = max(fault.ratio for fault in faults)
    if any(fault.is_slow_alone for fault in faults):
        return f"it takes {ratio:.1f} times as long as others, alone and with its neighbours"
    return f"its messages take {ratio:.1f} times as long as those of others"
