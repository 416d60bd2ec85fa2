# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`LinkTable`: measured times of messages between neighbours of a mesh, the content of links.json.

Of every link two messages are timed, a small and a large one:

    latency     alpha, seconds: time of the small message
    bandwidth   beta, bytes/s: difference of the bytes over the difference of the times, or large
                bytes over its time where the large message was not slower

The rates of an axis are those of its slowest kind of links (within a process, within a host,
between hosts), each kind by its median: a ring is as slow as its slowest link, and one broken link
is no property of the axis.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
from collections.abc import Sequence
from typing import Literal

from jaxmoe.configs import from_json, to_json
from jaxmoe.disk import replace_file
from jaxmoe.json_bounds import read_json

Reach = Literal["process", "host", "network"]

REACHES: tuple[Reach, ...] = ("process", "host", "network")
"""Kinds of links, the nearest first."""

VERSION = 1
"""Version of the layout of links.json."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Measured connection from a device to its next neighbour on a mesh axis, or to a process."""

    axis: str
    """Mesh axis, or `process+n` for a message to the process that is n further."""
    source: int
    """Number of the sending device, as JAX counts them."""
    target: int
    """Number of the receiving device."""
    reach: Reach
    """What the devices have in common: a process, a host (on a TPU, a slice), or a network only."""
    small_seconds: float
    """Seconds of the small message."""
    large_seconds: float
    """Seconds of the large message."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AxisSize:
    """Size of a mesh axis."""

    axis: str
    """Mesh axis."""
    size: int
    """Devices along it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinkRate:
    """Cost of a message: latency + bytes / bandwidth."""

    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes per second that one device sends."""


def slowest(rates: Sequence[LinkRate]) -> LinkRate:
    """Return the largest latency and the least bandwidth of some links."""
    return LinkRate(
        latency=max(rate.latency for rate in rates),
        bandwidth=min(rate.bandwidth for rate in rates),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinkTable:
    """All measured links of a mesh."""

    version: int = VERSION
    """Version of this layout."""
    device_kind: str
    """Kind of the devices, as JAX names it."""
    mesh: tuple[AxisSize, ...]
    """Axes of the mesh, in order."""
    processes: tuple[int, ...]
    """Process of each device, in the order of the mesh."""
    devices: tuple[int, ...]
    """Number of each device, in the order of the mesh."""
    small_bytes: int
    """Bytes of the small message."""
    large_bytes: int
    """Bytes of the large message."""
    links: tuple[Link, ...]
    """Links of every axis with more than one device."""

    def __post_init__(self):
        if self.version != VERSION:
            raise ValueError(
                f"links.version={self.version} is not the version {VERSION} that is read here:"
                " measure again with jaxmoe doctor --links"
            )
        if not 0 < self.small_bytes < self.large_bytes:
            raise ValueError(
                f"links.small_bytes={self.small_bytes} must be above 0 and below"
                f" links.large_bytes={self.large_bytes}"
            )
        for link in self.links:
            if not (link.small_seconds > 0 and link.large_seconds > 0):
                raise ValueError(
                    f"links: {link.axis} {link.source} -> {link.target} took"
                    f" {link.small_seconds} and {link.large_seconds} s: both must be above 0"
                )

    def rate(self, link: Link) -> LinkRate:
        """Return latency and bandwidth of one link.

        Args:
            link: Link of this table.
        """
        return self._rate(link.small_seconds, link.large_seconds)

    def axis_rate(self, axis: str) -> LinkRate | None:
        """Return latency and bandwidth of an axis; None where it has no measured link.

        Args:
            axis: Mesh axis.
        """
        rates = []
        for reach in REACHES:
            kind = [link for link in self.links if link.axis == axis and link.reach == reach]
            if kind:
                small = statistics.median(link.small_seconds for link in kind)
                large = statistics.median(link.large_seconds for link in kind)
                rates.append(self._rate(small, large))
        return slowest(rates) if rates else None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write links.json, with the rates of every link and axis for other readers.

        Args:
            path: File.
        """
        data = to_json(self)
        for link, entry in zip(self.links, data["links"], strict=True):
            entry |= dataclasses.asdict(self.rate(link))
        axes = {axis.axis: self.axis_rate(axis.axis) for axis in self.mesh}
        data["axes"] = {axis: dataclasses.asdict(rate) for axis, rate in axes.items() if rate}
        replace_file(path, json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LinkTable:
        """Return the table of a links.json.

        Args:
            path: File that `save` wrote.

        Raises:
            ValueError: The file is missing, no JSON, or no table of links.
        """
        try:
            data = read_json(pathlib.Path(path))
        except OSError as error:
            raise ValueError(
                f"links={path} cannot be read ({error.strerror}): write it with"
                " jaxmoe doctor --links"
            ) from error
        if not isinstance(data, dict) or not isinstance(data.get("links"), list):
            raise ValueError(f"links={path} is not a table of links: it has no list 'links'")
        derived = {field.name for field in dataclasses.fields(LinkRate)}
        links = [
            {name: value for name, value in link.items() if name not in derived}
            if isinstance(link, dict)
            else link
            for link in data["links"]
        ]
        fields = {name: value for name, value in data.items() if name != "axes"}
        return from_json(cls, fields | {"links": links})

    def _rate(self, small: float, large: float) -> LinkRate:
        more_bytes = self.large_bytes - self.small_bytes
        more_seconds = large - small
        if more_seconds <= 0.0:
            more_bytes = self.large_bytes
            more_seconds = large
        return LinkRate(latency=small, bandwidth=more_bytes / more_seconds)
