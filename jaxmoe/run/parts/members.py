# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the parts of a run: those that its config, its environment or its history ask for.

A part is imported when a run asks for it, by its address in `jaxmoe/catalog/run_parts.py`. What the
tuple `parts` of the config names follows. To add a part that no field asks for: a row in
`jaxmoe/catalog/runs.py`.
"""

from __future__ import annotations

import os
import pkgutil
import time

import jax

from jaxmoe.catalog.run_parts import HISTORY, PARTS, REQUESTS
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts.base import RunPart
from jaxmoe.run.provenance.lineage import shared_lineage
from jaxmoe.run.supervision import Supervision, Watches
from jaxmoe.training.loop import StopReason
from jaxmoe.training.state import TrainState
from sharding.distributed import agree

_POLL_SECONDS = 0.5
"""Seconds between two looks for a request."""


def make_parts(
    config: PretrainConfig, directory: RunDirectory, supervision: Supervision
) -> list[RunPart]:
    """Return the parts of a run, in the order in which they act; every process must call this.

    Args:
        config: Configuration of this start.
        directory: Run directory, which is not held yet.
        supervision: Watchdog, signals and resources of this process.

    Raises:
        ValueError: The run cannot have a part, or its lineage.json is damaged.
    """
    names = {event.event for event in shared_lineage(directory)}
    past = {address for name, address in HISTORY.items() if agree(name in names)}
    addresses = [address for asks, address in PARTS if asks(config) or address in past]
    parts: list[RunPart] = [
        pkgutil.resolve_name(address)(config, directory, supervision) for address in addresses
    ]
    parts += [Request(name, config, directory, supervision, parts) for name in REQUESTS]
    parts += [member.build(directory, supervision) for member in config.parts]
    return parts


class Request(RunPart):
    """Adds a part to a run once a file in the run directory asks for it.

    Args:
        name: Name of the file.
        config: Configuration of the run.
        directory: Run directory.
        supervision: Watchdog, signals and resources of this process, which closes the part.
        parts: Parts of the run, to which the part is added.
    """

    def __init__(
        self,
        name: str,
        config: PretrainConfig,
        directory: RunDirectory,
        supervision: Supervision,
        parts: list[RunPart],
    ):
        self._file = directory.path / name
        self._address = REQUESTS[name]
        self._arguments = config, directory, supervision
        self._resources = supervision.resources
        self._parts = parts
        self._part: RunPart | None = None
        self._loop: tuple[Assembly, int, TrainState, Watches] | None = None
        self._looked = -_POLL_SECONDS

    def begin(self, assembly: Assembly, step: int, state: TrainState, watches: Watches) -> None:
        """Keep what a part is told of the loop, of its state the shapes."""
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
        )
        self._loop = assembly, step, shapes, watches

    def event(self) -> StopReason | None:
        """Add the part when the first process sees the file; it is asked for events at once."""
        if self._part is not None:
            return None
        is_there, now = False, time.monotonic()
        if jax.process_index() == 0 and now - self._looked >= _POLL_SECONDS:
            self._looked = now
            is_there = os.path.lexists(self._file)
        if agree(is_there):
            assert self._loop is not None  # the loop has begun
            part = self._part = self._make()
            self._resources.callback(part.close)
            part.begin(*self._loop)
            self._parts.append(part)
        return None

    def ended(self, step: int, status: str) -> None:
        """Let a part answer a request that came too late for this loop."""
        if self._part is None and jax.process_index() == 0 and os.path.lexists(self._file):
            part = self._make()
            part.ended(step, status)
            part.close()

    def _make(self) -> RunPart:
        return pkgutil.resolve_name(self._address)(*self._arguments)
