# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the parts of a run: those that fields of its config ask for, and those of `parts`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxmoe.resilience.links.probe import LinkProbe
from jaxmoe.resilience.links.watch import PROBE_BYTES, LinkHook
from jaxmoe.resilience.recompute import RecomputedStep
from jaxmoe.resilience.snapshot import SnapshotStore
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.compile import CompiledStep
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.elastic.resizing import Resizing
from jaxmoe.run.monitoring import Watches
from jaxmoe.run.parts.base import RunPart
from jaxmoe.run.parts.snapshots import Snapshots
from jaxmoe.run.recovery import averaged_events, record_averaged
from jaxmoe.run.replicas.islands import connect_island
from jaxmoe.run.restore import Begun
from jaxmoe.run.supervision import Supervision
from jaxmoe.training.hooks import Hook
from jaxmoe.training.optimizer_files.part_files import PartFiles


def make_parts(
    begun: Begun,
    directory: RunDirectory,
    supervision: Supervision,
    snapshots: SnapshotStore | None,
) -> tuple[RunPart, ...]:
    """Return the parts of a run, in the order in which they act.

    Args:
        begun: State that the run begins with.
        directory: Run directory, held by the first process.
        supervision: Watchdog, signals and resources of this process, which closes the parts.
        snapshots: Snapshots of this process; None without any.
    """
    assembly, config = begun.assembly, begun.assembly.plan.config
    parts: list[RunPart] = [Replacement(directory), Resizing(directory)]
    if assembly.files is not None:
        parts.append(OptimizerFiles(assembly.files))
    if snapshots is not None:
        parts.append(Snapshots(snapshots))
    if assembly.island is not None and begun.step < config.training.steps:
        parts.append(connect_island(assembly, begun.state, supervision))
    if config.checkpoint.recompute:
        parts.append(Recomputation(config.checkpoint.recompute))
    if config.watch.links_every:
        parts.append(LinkMeasurements(config.watch.links_every))
    parts += [one.build(begun, supervision) for one in config.parts]
    for part in parts:
        supervision.resources.callback(part.close)
    return tuple(parts)


class Recomputation(RunPart):
    """Computes steps twice, which finds a device that computes wrong numbers.

    Args:
        every: Steps between comparisons.
    """

    def __init__(self, every: int):
        self._every = every

    def around(self, step_function: CompiledStep, assembly: Assembly, step: int) -> CompiledStep:
        """Return the step that is computed twice every few steps."""
        del assembly
        return RecomputedStep(step_function, self._every, step)


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
            log=watches.reporter.watched,
        )
        return (hook,)


class Replacement(RunPart):
    """Records in lineage and summary what was replaced in a state that had lost a part.

    Args:
        directory: Run directory, held by the first process.
    """

    def __init__(self, directory: RunDirectory):
        self._directory = directory

    def restored(self, begun: Begun) -> None:
        """Record what was replaced, if anything."""
        if begun.averaged is not None and jax.process_index() == 0:
            record_averaged(self._directory, begun.averaged)

    def rows(self) -> Mapping[str, Any]:
        """Return what was replaced in the run so far, if anything."""
        replaced = averaged_events(self._directory)
        return {"averaged": replaced} if replaced else {}


class OptimizerFiles(RunPart):
    """Tells where the optimiser state lies that is kept in files.

    Args:
        files: Files of the run.
    """

    def __init__(self, files: PartFiles):
        self._files = files

    def rows(self) -> Mapping[str, Any]:
        """Return directory, size and speed of the files."""
        return {"optimizer_files": self._files.facts()}
