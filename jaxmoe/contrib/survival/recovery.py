# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Restores a step that lacks a part, such as a pipeline stage (`--parts check_free`).

Used only where no snapshot and no checkpoint is whole: with the snapshot of which the fewest
processes are lost, or else with the newest damaged checkpoint. What is lost is replaced:

    layers of the pipeline     the weighted mean of their neighbours (CheckFree, arXiv 2506.15461);
                               a layer of which any parameter is lost is replaced altogether
    their optimiser state      that of a new run
    rows of embedding, head    their copies, which the stage after the lost one keeps; the values of
                               a new run where it is lost too. Their optimiser state is new
    everything else            the values of a new run
    counters                   nothing: the step is refused

The learning rate is higher for `check_free.recovery_steps` steps. A log line, the run's lineage and
its summary record what was replaced.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import Array, Float

from jaxmoe.checkpoint.manifest import (
    CheckpointAbandonedError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManifest,
    check_target,
)
from jaxmoe.checkpoint.optional_parts import without_optional
from jaxmoe.contrib.survival.layer_norms import LayerNorms, VocabularyMirror
from jaxmoe.contrib.survival.neighbours import RATE, Sources, sources_of
from jaxmoe.contrib.survival.shared_snapshot import shared_snapshot
from jaxmoe.contrib.survival.snapshot_store import SnapshotStore
from jaxmoe.contrib.survival.surviving import (
    Box,
    Survey,
    Survivors,
    damaged_steps,
    inside,
    open_surviving,
    overlap,
    survey,
)
from jaxmoe.parameters import ParameterTable
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import PretrainConfig, RunPartConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import RunPart
from jaxmoe.run.plan import by_updates, make_plan
from jaxmoe.run.provenance.lineage import Event, add_event, read_lineage, shared_lineage
from jaxmoe.run.restore import Place, PlacedSource, Search, StartingPoint
from jaxmoe.run.supervision import Supervision
from jaxmoe.state_tree import SEPARATOR, pack, unpack
from jaxmoe.training.parts.base import StepPart
from jaxmoe.training.state import TrainState
from sharding import axes as ax
from sharding.distributed import share

logger = logging.getLogger(__name__)

_NORMS = f"parts{SEPARATOR}{LayerNorms.name}"
_MIRROR = f"parts{SEPARATOR}{VocabularyMirror.name}{SEPARATOR}"

AVERAGED = "averaged"
"""Event of the lineage."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averaged:
    """A state with parts that were replaced."""

    step: int
    state: TrainState
    changes: tuple[str, ...]
    """What was replaced, as text."""
    where: str
    """What was read."""


def restore_averaged(
    directory: Any,
    state: TrainState,
    table: ParameterTable,
    check: Callable[[CheckpointManifest], None],
) -> Averaged | None:
    """Return the newest damaged step with its lost parts replaced; None if none was set aside.

    Args:
        directory: Directory to which damaged steps are moved.
        state: State before the first step, on its devices.
        table: Parameters of the model.
        check: Function that raises a ValueError to refuse a manifest.

    Raises:
        CheckpointError: No step can be restored in this way; the message has the reasons.
    """
    reasons = []
    for step in damaged_steps(directory):
        try:
            survey_of_step = survey(step)
            check(survey_of_step.manifest)
            with open_surviving(survey_of_step) as survivors:
                return _restore(survivors, state, table, str(step))
        except CheckpointAbandonedError:
            continue
        except CheckpointDamagedError as error:
            reasons.append(str(error))
    if reasons:
        raise CheckpointError(
            "parts:check_free cannot replace what is lost:"
            f" {'; '.join(reasons)}: start in another directory, or restore a copy"
        )
    return None


def restore_averaged_snapshot(
    snapshots: SnapshotStore,
    directory: pathlib.Path,
    state: TrainState,
    table: ParameterTable,
    check: Callable[[CheckpointManifest], None],
) -> Averaged | None:
    """Return the most complete snapshot of several processes, with its lost parts replaced.

    None, with a warning, if there is none, or too much is lost.

    Args:
        snapshots: Snapshots of this process.
        directory: Directory on a disk that all processes share, for the time of the restore.
        state: State before the first step, on its devices.
        table: Parameters of the model.
        check: Function that raises a ValueError to refuse a manifest.
    """
    try:
        with shared_snapshot(snapshots, directory, state, check) as survivors:
            if survivors is None:
                return None
            return _restore(survivors, state, table, "the snapshots in memory")
    except CheckpointDamagedError as error:
        if jax.process_index() == 0:
            logger.warning("%s", error)
        return None


def _restore(
    survivors: Survivors, state: TrainState, table: ParameterTable, where: str
) -> Averaged:
    survey_of_step = survivors.survey
    check_target(survey_of_step.manifest, without_optional(survey_of_step.manifest, state), where)
    stacked = {
        f"params{SEPARATOR}{row.path}": row.shape[0]
        for row in table
        if row.declaration.axes[:1] == (ax.LAYERS,)
    }
    flat: dict[str, Any] = dict(traverse_util.flatten_dict(pack(state), sep=SEPARATOR))
    saved = [path for path in flat if path in survey_of_step.manifest.arrays]
    if scalars := [path for path in saved if not flat[path].ndim and survey_of_step.num_lost(path)]:
        raise CheckpointDamagedError(f"{where} has lost counters: {', '.join(scalars[:5])}")
    sources = _sources(survivors, stacked, where)
    mirrors = _Mirror.all_of(survey_of_step, table)
    for path in saved:
        lost = _layers_of(path, stacked, sources)
        mirror = mirrors.get(path)
        leaf = flat[path]
        flat[path] = _fill(survivors, path, leaf, lost, mirror, is_averaged=path in stacked)
    changes = _changes(survey_of_step, stacked, sources, mirrors)
    for change in changes:
        logger.warning("a part of %s is lost: %s", where, change)
    restored = unpack(traverse_util.unflatten_dict(flat, sep=SEPARATOR), state)
    return Averaged(step=survey_of_step.manifest.step, state=restored, changes=changes, where=where)


def _sources(survivors: Survivors, stacked: Mapping[str, int], where: str) -> Sources:
    """Return the lost layers, and those from which each is made."""
    lost = {
        layer
        for path in stacked
        for (first, last), *_ in survivors.survey.lost.get(path, ())
        for layer in range(first, last)
    }
    (length,) = set(stacked.values())
    norms = np.zeros(length, np.float32)
    if _NORMS in survivors.survey.manifest.arrays:
        norms = survivors.read(_NORMS, ((0, length),), norms)
    try:
        return sources_of(lost, norms)
    except ValueError as error:
        raise CheckpointDamagedError(f"{where}: {error}") from error


def _layers_of(path: str, stacked: Mapping[str, int], sources: Sources) -> Sources:
    """Return the lost layers of an array; none if it has no layers of the pipeline."""
    is_stacked = path in stacked or (
        path.startswith("opt_state")
        and any(path.endswith(name.removeprefix("params")) for name in stacked)
    )
    return sources if is_stacked else {}


@dataclasses.dataclass(frozen=True, slots=True)
class _Mirror:
    """Copy of a parameter, shifted along the vocabulary by the rows of a stage."""

    path: str
    axis: int
    """Dimension of the vocabulary."""
    shift: int
    """Place of the first row in the copy."""
    shape: tuple[int, ...]

    @classmethod
    def all_of(cls, survey_of_step: Survey, table: ParameterTable) -> dict[str, _Mirror]:
        """Return the copies that a step has, by the paths of the parameters."""
        mirrors = {}
        manifest = survey_of_step.manifest
        stages = manifest.config.get("execution", {}).get("mesh", {}).get("stage", 1)
        for row in table:
            path = f"{_MIRROR}{row.path}"
            # Copies are zeros until the first step has ended.
            if path in manifest.arrays and stages > 1 and manifest.step > 0:
                axis = row.declaration.axes.index(ax.VOCAB)
                shape = row.shape
                mirror = cls(path, axis, shape[axis] // stages, shape)
                mirrors[f"params{SEPARATOR}{row.path}"] = mirror
        return mirrors

    def places(self, box: Box) -> list[tuple[Box, Box]]:
        """Return the parts of a box of the parameter, and where the copy has them."""
        size, (first, last) = self.shape[self.axis], box[self.axis]
        places = []
        for turn in (0, size):  # rows that are shifted past the end are at the beginning
            low = max(first, turn - self.shift)
            high = min(last, turn - self.shift + size)
            if low < high:
                mirror_place = (low + self.shift - turn, high + self.shift - turn)
                places.append((self._with(box, (low, high)), self._with(box, mirror_place)))
        return places

    def num_lost(self, survey_of_step: Survey) -> int:
        """Return the values of the parameter that are lost in the copy as well."""
        lost = survey_of_step.lost.get(self.path, ())
        pairs = [
            overlap(mirror_place, lost_box)
            for box in survey_of_step.lost.get(
                self.path.replace(_MIRROR, f"params{SEPARATOR}", 1), ()
            )
            for _, mirror_place in self.places(box)
            for lost_box in lost
        ]
        sizes = (
            [last - first for first, last in shared_box]
            for shared_box in pairs
            if shared_box is not None
        )
        return sum(math.prod(size) for size in sizes)

    def _with(self, box: Box, ends: tuple[int, int]) -> Box:
        return (*box[: self.axis], ends, *box[self.axis + 1 :])


def _fill(
    survivors: Survivors,
    path: str,
    leaf: Array,
    lost: Sources,
    mirror: _Mirror | None,
    *,
    is_averaged: bool,
) -> Array:
    """Return an array with what survives, means or new values of lost layers, copies, or new
    values."""
    new = {_box_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}

    def part(index: Any) -> np.ndarray:
        box = _box_of(index, leaf.shape)
        box_values = np.asarray(new[box])
        instead = np.array(box_values)
        if mirror is not None:
            for target, mirror_place in mirror.places(box):
                at = inside(target, box)
                instead[at] = survivors.read(mirror.path, mirror_place, instead[at])
        values = survivors.read(path, box, instead)
        for layer, sources in lost.items():
            first, last = box[0]
            if not first <= layer < last:
                continue
            if not is_averaged:
                values[layer - first] = box_values[layer - first]
                continue
            mean = np.zeros(values.shape[1:], np.float64)
            for source, weight in sources:
                mirror_place = ((source, source + 1), *box[1:])
                nothing = np.zeros((1, *values.shape[1:]), values.dtype)
                mean += weight * survivors.read(path, mirror_place, nothing)[0].astype(np.float64)
            values[layer - first] = mean.astype(values.dtype)
        return values

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def _box_of(index: Any, shape: tuple[int, ...]) -> Box:
    parts = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((first, last) for first, last, _ in parts)


def _changes(
    survey_of_step: Survey,
    stacked: Mapping[str, int],
    sources: Sources,
    mirrors: Mapping[str, _Mirror],
) -> tuple[str, ...]:
    """Return what was replaced, as text."""
    changes = []
    for layer, made_of in sources.items():
        names = " and ".join(f"{weight:.3f} of layer {source}" for source, weight in made_of)
        changes.append(f"layer {layer} is {names}, with new optimiser state")
    for path in survey_of_step.lost:
        if path in stacked or not path.startswith(("params", "router_state")):
            continue
        total = int(np.prod(survey_of_step.manifest.arrays[path]["shape"]))
        lost = survey_of_step.num_lost(path)
        if path in mirrors:
            num_new = mirrors[path].num_lost(survey_of_step)
            changes.append(f"{lost - num_new} of {total} values of {path} are from their copy")
            lost = num_new
        if lost:
            changes.append(f"{lost} of {total} values of {path} are new")
    return tuple(changes) or ("optimiser state or records are new where they are lost",)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckFreeConfig(RunPartConfig):
    """Replaces the layers of a lost pipeline stage by the mean of their neighbours.

    Used where neither a snapshot nor any checkpoint is whole, with the newest that lost a stage. It
    changes the model, and keeps in the state the gradient norms of the layers, and with each stage
    the rows of embedding and head of the one before.
    """

    name: ClassVar[str] = "check_free"

    recovery_steps: int = 100
    """Steps after such a replacement with 1.1 times the learning rate; 0 for none."""

    def __post_init__(self):
        if self.recovery_steps < 0:
            raise ValueError(f"{self.name}.recovery_steps={self.recovery_steps} must be 0 or more")

    @property
    def step_parts(self) -> tuple[StepPart, ...]:
        """What each step keeps: norms of the layers, and copies of the rows of the vocabulary."""
        return LayerNorms(), VocabularyMirror()

    def build(self, directory: RunDirectory, supervision: Supervision) -> Replacement:
        """Return the part."""
        del supervision
        return Replacement(directory)


class Replacement(RunPart):
    """Replaces what is lost of a state, and records it in lineage and summary.

    Args:
        directory: Run directory.
    """

    def __init__(self, directory: RunDirectory):
        self._directory = directory
        self._replaces = False

    def prepare(self, assembly: Assembly) -> Assembly:
        """Return the assembly with a higher learning rate after the steps of replacements."""
        self._replaces = assembly.plan.config.part(CheckFreeConfig.name) is not None
        is_first = jax.process_index() == 0
        events = shared_lineage(self._directory)
        steps = [event.step for event in events if event.event == AVERAGED]
        shared = share(np.asarray(steps, np.int32), is_first)
        return with_raised_rate(assembly, tuple(shared.tolist()))

    def sources(self) -> Sequence[PlacedSource]:
        """Return the newest damaged checkpoint, if what it lost is to be replaced."""
        return ((Place.LOST, _from_damaged),) if self._replaces else ()

    def record(self, start: StartingPoint) -> None:
        """Record what was replaced, if anything."""
        if start.changes and jax.process_index() == 0:
            event = Event(event=AVERAGED, step=start.step, changes=start.changes)
            add_event(self._directory, event)

    def rows(self) -> Mapping[str, Any]:
        """Return what was replaced in the run so far, if anything."""
        events = read_lineage(self._directory) if jax.process_index() == 0 else ()
        replaced = [str(event) for event in events if event.event == AVERAGED]
        return {"averaged": replaced} if replaced else {}


def _from_damaged(search: Search) -> StartingPoint | None:
    """Return the newest damaged checkpoint, of which what was lost is replaced."""
    assembly = search.assembly
    averaged = restore_averaged(
        search.checkpoints.damaged_directory,
        assembly.new_state(),
        assembly.plan.table,
        search.continuation.check_own,
    )
    return None if averaged is None else begun_with(search, averaged)


def begun_with(search: Search, averaged: Averaged) -> StartingPoint:
    """Return a state with parts that were replaced, and a higher learning rate after its step.

    Args:
        search: What the state is for.
        averaged: State.
    """
    origin = f"step {averaged.step} from {averaged.where}, of which a part was lost"
    start = search.with_data(averaged.step, averaged.state, origin)
    raised = with_raised_rate(start.assembly, (averaged.step,))
    return dataclasses.replace(start, assembly=raised, changes=averaged.changes)


def _recovery_steps(config: PretrainConfig) -> int:
    """Return the steps with a higher rate; the default where the run was averaged before."""
    chosen = [part for part in config.parts if isinstance(part, CheckFreeConfig)]
    return (chosen or [CheckFreeConfig()])[0].recovery_steps


def with_raised_rate(assembly: Assembly, steps: tuple[int, ...]) -> Assembly:
    """Return an assembly whose learning rate is higher after some steps.

    Args:
        assembly: Plan, devices and data of the run.
        steps: Steps at which the run was averaged.
    """
    plan = assembly.plan
    length = _recovery_steps(plan.config)
    raised = tuple(sorted({*plan.raised, *steps}))
    if not length or raised == plan.raised:
        return assembly
    before = make_plan(plan.config).schedule

    def factor(step: Array) -> Float[Array, ""]:
        is_raised = jnp.zeros((), jnp.bool_)
        for first in raised:
            is_raised |= (step >= first) & (step < first + length)
        return before(step) * jnp.where(is_raised, jnp.float32(RATE), jnp.float32(1.0))

    optimizer = plan.config.optimizer.build(plan.table, by_updates(factor, plan.config))
    plan = dataclasses.replace(plan, schedule=factor, optimizer=optimizer, raised=raised)
    return dataclasses.replace(assembly, plan=plan)
