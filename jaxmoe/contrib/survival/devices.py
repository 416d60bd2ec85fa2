# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds devices that compute wrong numbers, and devices and links that are slow."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jaxmoe.contrib.survival.links.probe import LinkProbe
from jaxmoe.contrib.survival.links.watch import PROBE_BYTES, LinkHook
from jaxmoe.contrib.survival.recompute import RecomputedStep
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.compile import CompiledStep
from jaxmoe.run.parts import ConfiguredPart
from jaxmoe.run.supervision import Watches
from jaxmoe.training.hooks import Hook


class Recomputation(ConfiguredPart):
    """Computes steps twice, which finds a device that computes wrong numbers."""

    def around(self, step_function: CompiledStep, assembly: Assembly, step: int) -> CompiledStep:
        """Return the step that is computed twice every few steps."""
        del assembly
        return RecomputedStep(step_function, self.config.checkpoint.recompute, step)


class LinkMeasurements(ConfiguredPart):
    """Measures the links between devices, and names slow ones."""

    def hooks(self, assembly: Assembly, watches: Watches) -> Sequence[Hook]:
        """Return the hook that measures; none on one device."""
        if assembly.mesh.size == 1:
            return ()
        hook = LinkHook(
            functools.partial(LinkProbe, assembly.mesh, PROBE_BYTES),
            every=self.config.watch.links_every,
            report=watches.warn,
            log=watches.reporter.log_numbers,
        )
        return (hook,)
