# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds devices that compute wrong numbers, and devices and links that are slow."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

from jaxmoe.contrib.survival.links.probe import LinkProbe
from jaxmoe.contrib.survival.links.watch import PROBE_BYTES, LinkHook
from jaxmoe.contrib.survival.recompute import RecomputedStep
from jaxmoe.layers.context import require_positive
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.compile import CompiledStep
from jaxmoe.run.config import RunPartConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import RunPart
from jaxmoe.run.supervision import Supervision, Watches
from jaxmoe.training.hooks import Hook


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecomputationConfig(RunPartConfig):
    """Computes steps twice, which finds a device that computes wrong numbers."""

    name: ClassVar[str] = "recomputation"

    every: int = 1000
    """Steps between steps that are computed twice and must agree bitwise; takes the memory of a
    second state."""

    def __post_init__(self):
        require_positive(self.name, self, "every")

    def build(self, directory: RunDirectory, supervision: Supervision) -> Recomputation:
        """Return the part."""
        del directory, supervision
        return Recomputation(self.every)


class Recomputation(RunPart):
    """Computes steps twice.

    Args:
        every: Steps between such steps.
    """

    def __init__(self, every: int):
        self._every = every

    def around(self, step_function: CompiledStep, assembly: Assembly, step: int) -> CompiledStep:
        """Return the step that is computed twice every few steps."""
        del assembly
        return RecomputedStep(step_function, self._every, step)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinkMeasurementsConfig(RunPartConfig):
    """Measures the links between devices with messages of 1 MiB, and names slow ones."""

    name: ClassVar[str] = "link_measurements"

    every: int = 100
    """Steps between measurements."""

    def __post_init__(self):
        require_positive(self.name, self, "every")

    def build(self, directory: RunDirectory, supervision: Supervision) -> LinkMeasurements:
        """Return the part."""
        del directory, supervision
        return LinkMeasurements(self.every)


class LinkMeasurements(RunPart):
    """Measures the links between devices, and names slow ones.

    Args:
        every: Steps between measurements.
    """

    def __init__(self, every: int):
        self._every = every

    def hooks(self, assembly: Assembly, watches: Watches) -> Sequence[Hook]:
        """Return the hook that measures; none on one device."""
        if assembly.mesh.size == 1:
            return ()
        hook = LinkHook(
            functools.partial(LinkProbe, assembly.mesh, PROBE_BYTES),
            every=self._every,
            report=watches.warn,
            log=watches.reporter.log_numbers,
        )
        return (hook,)
