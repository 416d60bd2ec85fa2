# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A training step whose optimiser state lies in files (Fuyou, arXiv 2403.06504).

    gradients   one program; meanwhile the first part is read
    update      one program for each part, called by the host; equal parts share one
    judgement   one program: the new parameters and counters, or the old ones

A step is refused before the update if the guard does not accept its loss or the norm of its
gradients, and after it if a new number is not finite; the files are untouched in both cases (see
`part_files.py`). New parameters on the device are written over the gradients that made them.

An accepted step reads and writes each byte of the state once. A step refused before the update
reads the first part.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxmoe.contrib.offload.file_array import FileArray
from jaxmoe.contrib.offload.optimizer_parts import (
    Module,
    OwnedState,
    UpdateInParts,
    check_layerwise,
    modules_of,
)
from jaxmoe.contrib.offload.part_files import PartFiles, PartLayout, Pass
from jaxmoe.data.batch import Batch
from jaxmoe.errors import EndRunError
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.scaling.initialize import lay_out
from jaxmoe.training.estimators.base import StepGradients
from jaxmoe.training.guard import all_finite, select
from jaxmoe.training.metrics import StepMetrics
from jaxmoe.training.parts.update import (
    CheckedStep,
    Clipped,
    Inputs,
    Update,
    UpdatedParams,
    UpdatedState,
    trained_modules,
)
from jaxmoe.training.state import TrainState
from sharding.constrain import place_like

if TYPE_CHECKING:
    from jaxmoe.training.step import Step


class OptimizerFilesError(EndRunError):
    """A file of the optimiser state could not be read or written; the state is that before."""

    status = "not_saved"


class PreparedUpdate(NamedTuple):
    """Results of the program that makes the gradients."""

    gradients: StepGradients
    """Sums over the batch, without gradients."""
    clipped: Clipped
    """Norm of the gradients; these are apart."""
    may_update: Bool[Array, ""]
    """Whether the guard accepts loss and norm, and there is a signal."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counters(UpdatedState):
    """Counters of an optimiser, whose arrays lie in files."""

    new: Any
    old: Any
    is_finite: Bool[Array, ""]

    def kept(self, is_good: Bool[Array, ""]) -> Any:
        """Return the new or the old counters."""
        return select(is_good, self.new, self.old)


@dataclasses.dataclass(frozen=True, slots=True)
class ModulePart:
    """One part of the state."""

    module: Module
    number: int
    places: tuple[int, ...]
    """Places of its arrays among the leaves of the state."""


def parts_of(
    model: ModelConfig, params: Any, opt_state: Any, number: int
) -> tuple[ModulePart, ...]:
    """Return the parts of an optimiser state, in the order of their updates.

    Args:
        model: Model with the scans.
        params: Parameters that are trained, or their shapes.
        opt_state: State, or its shapes.
        number: Least number of parts of each scan.
    """
    state = OwnedState.of(opt_state, params)
    return tuple(
        ModulePart(module, part, tuple(state.places(module.name)))
        for module in modules_of(model, params, number)
        for part in range(module.parts or 1)
    )


def open_files(directory: str, step: Step, shapes: TrainState) -> PartFiles:
    """Return the files of an optimiser state, of full length and without values.

    Args:
        directory: Directory of the files.
        step: Step that will use them.
        shapes: State, or its shapes.

    Raises:
        ValueError: The directory cannot be written, has no space, or is in use; or there are
            several processes.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"execution.offload.optimizer=files keeps the state of one process, and there are"
            f" {jax.process_count()}: set execution.offload.optimizer to host"
        )
    trained = step.table.select_trained(shapes.params) if step.table is not None else shapes.params
    leaves = jax.tree.leaves(shapes.opt_state)
    parts = parts_of(step.model, trained, shapes.opt_state, step.execution.optimizer_parts)
    return PartFiles(directory, [_layout(part, leaves) for part in parts])


def _layout(part: ModulePart, leaves: Sequence[Any]) -> PartLayout:
    parts = part.module.parts
    arrays = []
    for place in part.places:
        shape = tuple(leaves[place].shape)
        if parts is not None:
            shape = (shape[0] // parts, *shape[1:])
        arrays.append((shape, leaves[place].dtype))
    return PartLayout.of(f"{part.module.name}-{part.number:03d}", arrays)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UpdateFromFiles(Update):
    """Part after part, of a state in files."""

    name: ClassVar[str] = "files"

    files: PartFiles | None = None
    """Files of the state, of `open_files`; a step without any can be traced."""

    def check(self, step: Step) -> None:
        """Refuse an optimiser that does not promise to treat each layer by itself."""
        check_layerwise(step.execution, step.optimizer)

    def fetches(
        self, model: ModelConfig, params: Any, execution: ExecutionConfig
    ) -> Mapping[str, float]:
        """Return 1 for each module; see the base class."""
        return dict.fromkeys(trained_modules(params), 1.0)

    def update(
        self, step: Step, state: TrainState, inputs: Inputs
    ) -> tuple[Any, Any, UpdatedState]:
        """Return updates, parameters and state in one program, as planners trace it."""
        return UpdateInParts().update(step, state, inputs)

    def jit_step(self, step: Step) -> CheckedStep:
        """Return the step of several programs, between which the host reads and writes files."""
        return CheckedStep(FilesStep(step, self.files), step.model.vocab_size)


class FilesStep:
    """Step (state, batch) -> (state, metrics) that updates the state part by part from files.

    A state whose arrays are in memory, as it is created or restored, goes to the files first.

    Args:
        step: Fields of the step.
        files: Files of the state; a step without any can be traced.
    """

    def __init__(self, step: Step, files: PartFiles | None):
        self._step = step
        self._files = files
        self._begin: Any = jax.jit(self._begin_update)
        self._update = functools.lru_cache(maxsize=None)(self._updater)
        self._accept = jax.jit(self._accept_state, donate_argnums=0)
        self._refuse = jax.jit(self._refuse_state, donate_argnums=0)

    def trace(self, state: TrainState, batch: Batch) -> Any:
        """Return the traced program that makes the gradients, which needs most memory."""
        return self._begin.trace(_without_arrays(state), batch)

    def lower(self, state: TrainState, batch: Batch) -> Any:
        """Return this step with its largest program lowered, for `compile`."""
        return _Lowered(self, self._begin.lower(_without_arrays(state), batch))

    def with_gradients(self, program: Any) -> FilesStep:
        """Return this step with a compiled program for the gradients."""
        step = copy.copy(self)
        step._begin = program
        return step

    def memory_analysis(self) -> Any:
        """Return what XLA says of the largest program, once `lower` and `compile` have run."""
        return self._begin.memory_analysis()

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Return the next state and metrics.

        Raises:
            ValueError: The step was made without files.
            OptimizerFilesError: A file cannot be read or written.
        """
        if self._files is None:
            raise ValueError(
                "execution.offload.optimizer=files needs the files of the state: give"
                " make_train_step update=UpdateFromFiles(files=open_files(...)), both of"
                " jaxmoe.contrib.offload.files_step, or set execution.offload.optimizer to host"
            )
        files = self._files
        since = time.perf_counter()
        opt_state = self._in_files(state)
        read = files.bytes_read
        written = files.bytes_written
        state = _without_arrays(state)
        running = files.begin()
        is_accepted = False
        try:
            prepared, grads = self._begin(state, batch)
            seconds = 0.0
            if prepared.may_update:
                since = time.perf_counter()
                params, counters, is_finite = self._update_parts(running, state, grads, opt_state)
                running.join()
                seconds = time.perf_counter() - since
                state, metrics = self._accept(state, prepared, params, counters, is_finite)
                is_accepted = not bool(metrics.is_skipped)
            else:
                state, metrics = self._refuse(state, prepared)
        except OSError as error:
            raise OptimizerFilesError(
                f"the optimizer state in {files.directory} cannot be read or written"
                f" ({error.strerror}): the run can continue from its checkpoint"
            ) from error
        finally:
            running.finish(is_accepted=is_accepted)
        disk = {
            "bytes_read": np.float64(files.bytes_read - read),
            "bytes_written": np.float64(files.bytes_written - written),
            "update_seconds": np.float64(seconds),
        }
        counters = iter(state.opt_state)
        opt_state = jax.tree.map(
            lambda leaf: leaf.renew() if isinstance(leaf, FileArray) else next(counters),
            opt_state,
        )
        state = dataclasses.replace(state, opt_state=opt_state)
        return state, dataclasses.replace(metrics, disk=disk)

    def _parts(self, state: TrainState, opt_state: Any) -> tuple[ModulePart, ...]:
        trained = self._select_trained(state.params)
        number = self._step.execution.optimizer_parts
        return parts_of(self._step.model, trained, opt_state, number)

    def _select_trained(self, params: Any) -> Any:
        return params if self._step.table is None else self._step.table.select_trained(params)

    def _in_files(self, state: TrainState) -> Any:
        """Return the state of the optimiser with its arrays in the files."""
        leaves, structure = jax.tree.flatten(state.opt_state)
        files = self._files
        assert files is not None  # checked by the caller
        arrays = [leaf for leaf in leaves if isinstance(leaf, FileArray)]
        if arrays:
            if not all(leaf.is_in(files) and not leaf.is_deleted() for leaf in arrays):
                raise ValueError(
                    "the optimizer state is that of an earlier step, or of other files"
                )
            return state.opt_state
        where: dict[int, list[tuple[int, int]]] = {}
        parts = self._parts(state, state.opt_state)
        for number, part in enumerate(parts):
            for place, leaf in enumerate(part.places):
                where.setdefault(leaf, []).append((number, place))
        for leaf, places in where.items():
            values = np.asarray(leaves[leaf])
            for number, place in places:
                module = parts[number].module
                part_number = parts[number].number
                size = len(values) // (module.parts or 1)
                files.store(number, place, values[part_number * size :][:size])
            before, leaves[leaf] = leaves[leaf], FileArray(files, tuple(places), leaves[leaf])
            del values
            before.delete()  # donated, as all of a state
        return structure.unflatten(leaves)

    def _update_parts(
        self, running: Pass, state: TrainState, grads: Any, opt_state: Any
    ) -> tuple[Any, Any, Bool[Array, ""]]:
        """Return parameters and counters after the update, and whether all is finite."""
        leaves = jax.tree.leaves(opt_state)
        is_finite = jnp.ones((), jnp.bool_)
        params = {**grads}
        counters = state.opt_state
        trained = self._select_trained(state.params)
        tokens: Any = None
        name = ""
        for part in self._parts(state, opt_state):
            if part.module.name != name:
                name = part.module.name
                written, tokens = _begin_module(params[name], trained[name])
            placed = [_on_device(leaves[place].sharding) for place in part.places]
            arrays = jax.device_put(running.take(), placed)
            written, new, counters, is_finite = self._update(part.module)(
                written,
                tokens,
                state.params,
                arrays,
                state.opt_state,
                is_finite,
                jnp.int32(part.number),
            )
            del arrays
            running.put(new)
            del new
            params[name] = written
        return params, counters, is_finite

    def _begin_update(self, state: TrainState, batch: Batch) -> tuple[PreparedUpdate, Any]:
        step = self._step
        gradients = step.begin(state, batch)
        summed = gradients.summed
        has_signal = gradients.has_signal
        clipped = step.clip_gradients(summed.grads)
        may_update = step.may_update(state, summed.loss, clipped.judged_norm)
        prepared = PreparedUpdate(
            gradients=gradients._replace(summed=dataclasses.replace(summed, grads=None)),
            clipped=clipped._replace(grads=None),
            may_update=may_update if has_signal is None else may_update & has_signal,
        )
        return prepared, self._cut(clipped.grads)

    def _cut(self, tree: Any) -> Any:
        """Return a tree like the parameters, laid out as the state of the optimiser."""
        layout = self._step.execution.state_layout.optimizer
        return lay_out(self._step.model, tree, rules=layout)

    def _updater(self, module: Module) -> Any:
        """Return the program that updates a part of a module."""

        def program(
            written: Any,
            tokens: list[Any],
            params: Any,
            arrays: list[Any],
            counters: list[Any],
            is_finite: Bool[Array, ""],
            number: Int[Array, ""],
        ) -> tuple[Any, Any, Any, Bool[Array, ""]]:
            trained = self._cut(self._select_trained(params))
            # The states and gradients of other modules are not read: the compiler removes them.
            state = OwnedState.of(self._step.optimizer.init(trained), trained).counting(counters)
            zeros = jax.tree.map(jnp.zeros_like, trained), trained
            mine, structure = jax.tree.flatten(trained[module.name])
            leaves = jax.tree.leaves(written)
            grads = [new if old is None else old for new, old in zip(leaves, tokens, strict=True)]
            part_gradients, values = (
                structure.unflatten([module.part(leaf, number) for leaf in tree])
                for tree in (grads, mine)
            )
            _, sums, new, counters = state.update_part(
                module.name, self._step.optimizer.update, zeros, arrays, part_gradients, values
            )
            is_finite &= all_finite((sums, new))
            written = jax.tree.map(
                lambda leaf, part: module.written(leaf, part, number), written, sums
            )
            return written, new, counters, is_finite

        return jax.jit(program, donate_argnums=0)

    def _accept_state(
        self,
        state: TrainState,
        prepared: PreparedUpdate,
        params: Any,
        counters: Any,
        is_finite: Array,
    ) -> tuple[TrainState, StepMetrics]:
        params = jax.tree.map(place_like, params, self._select_trained(state.params))
        if self._step.table is not None:
            params = self._step.table.merge(params, state.params)
        new = Counters(new=counters, old=state.opt_state, is_finite=is_finite)
        return self._judge(state, prepared, UpdatedParams(None, params, new))

    def _refuse_state(
        self, state: TrainState, prepared: PreparedUpdate
    ) -> tuple[TrainState, StepMetrics]:
        same = Counters(new=state.opt_state, old=state.opt_state, is_finite=jnp.ones((), bool))
        return self._judge(state, prepared, UpdatedParams(None, state.params, same))

    def _judge(
        self, state: TrainState, prepared: PreparedUpdate, update: UpdatedParams
    ) -> tuple[TrainState, StepMetrics]:
        state, metrics, _ = self._step.guard_update(
            state, prepared.gradients, prepared.clipped, update
        )
        return state, metrics


class _Lowered:
    """A step whose largest program is lowered."""

    def __init__(self, step: FilesStep, lowered: Any):
        self._step = step
        self._lowered = lowered

    def compile(self, compiler_options: dict[str, Any] | None = None) -> FilesStep:
        """Return the step; its small programs compile when they are first called."""
        return self._step.with_gradients(self._lowered.compile(compiler_options))


def _begin_module(grads: Any, params: Any) -> tuple[Any, list[Any]]:
    """Return what the new parameters are written over, and the gradients that are not."""
    tokens = [
        None if g.dtype == p.dtype else g
        for g, p in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True)
    ]
    written = jax.tree.map(lambda g, p: g if g.dtype == p.dtype else jnp.copy(p), grads, params)
    return written, tokens


def _without_arrays(state: TrainState) -> TrainState:
    """Return a state with the counters of the optimiser alone."""
    counters = [leaf for leaf in jax.tree.leaves(state.opt_state) if not leaf.ndim]
    return dataclasses.replace(state, opt_state=counters)


def _on_device(placed: Any) -> Any:
    """Return a sharding in device memory."""
    device = next(iter(placed.device_set))
    return placed.with_memory_kind(device.default_memory().kind)
