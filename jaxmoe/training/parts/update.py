# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Socket `Update`: how a step updates parameters and the state of its optimiser.

    check(step)                     refuses a step whose optimiser cannot be updated so
    fetches(model, params, ...)     how often the state of a module comes to the device
    jit_step(step)                  the step as one program, or as several
    update(step, state, inputs)     new parameters and state; the guard keeps or refuses all of it

`ExecutionConfig.update` names the member: it follows from where parameters and state lie.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from jaxtyping import Array, Bool, Float

from jaxmoe.catalog import choice
from jaxmoe.data.batch import Batch, check_batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.optim.steps import FiniteTransformation
from jaxmoe.scaling.initialize import lay_out
from jaxmoe.training.accumulation import GradientSums
from jaxmoe.training.guard import all_finite, select
from jaxmoe.training.host_arrays import on_device
from jaxmoe.training.metrics import StepMetrics
from jaxmoe.training.state import TrainState, fetch, put_away
from sharding.constrain import place_like

if TYPE_CHECKING:
    from jaxmoe.training.step import Step


class UpdatedState(abc.ABC):
    """State of an optimiser after an update that may still be refused."""

    is_finite: Bool[Array, ""]
    """Whether every number of the new state is finite."""

    @abc.abstractmethod
    def kept(self, is_good: Bool[Array, ""]) -> Any:
        """Return the new state or, bitwise, the old one, in its memory between steps."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeState(UpdatedState):
    """State that has been on the device as a whole."""

    new: Any
    old: Any
    execution: ExecutionConfig

    @property
    def is_finite(self) -> Bool[Array, ""]:
        """Whether every number of the new state is finite."""
        return all_finite(self.new)

    def kept(self, is_good: Bool[Array, ""]) -> Any:
        """Return the new or the old state."""
        return put_away(select(is_good, self.new, self.old), self.execution)


class Clipped(NamedTuple):
    """Gradients of a step after clipping."""

    grads: Any
    norm: Float[Array, ""]
    """Norm before clipping."""
    judged_norm: Float[Array, ""]
    """Norm that the guard compares with those of earlier steps."""
    scale: Float[Array, ""]
    """Factor of the gradients, which those in host memory have not been multiplied by."""


class UpdatedParams(NamedTuple):
    """Results of an optimiser."""

    updates: Any
    """What is added to the parameters; None where those of layers lie in host memory."""
    params: Any
    """Sums, laid out as the parameters."""
    opt_state: UpdatedState
    """New state of the optimiser, and the old one; it judges parameters in host memory too."""

    def is_finite(self, optimizer: optax.GradientTransformation) -> Bool[Array, ""]:
        """Return whether parameters and optimiser state are finite, given finite gradients.

        A `FiniteTransformation` need not be examined: the update, the choice between new and old,
        and their writing are then one pass over the state.

        Args:
            optimizer: Optimiser of the update.
        """
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(self.params)}
        is_whole = isinstance(self.opt_state, WholeState)
        if isinstance(optimizer, FiniteTransformation) and is_whole and dtypes <= _AS_FLOAT32:
            return jnp.ones((), bool)
        return all_finite(on_device(self.params)) & self.opt_state.is_finite


_AS_FLOAT32 = {jnp.dtype("float32"), jnp.dtype("bfloat16")}
"""Dtypes whose largest numbers are those of float32."""


class Inputs(NamedTuple):
    """What an optimiser reads, laid out as its state."""

    grads: Any
    """Clipped gradients."""
    params: Any
    """Parameters that are trained."""
    summed: GradientSums
    """Loss, and further arguments of the optimiser's update."""
    clipped: Clipped
    """Norm and factor of the gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Update(abc.ABC):
    """Base class of the members."""

    name: ClassVar[str]
    """Name in the catalogue."""

    @abc.abstractmethod
    def check(self, step: Step) -> None:
        """Refuse a step whose optimiser cannot be updated so, before anything is traced.

        Args:
            step: Step with the update.

        Raises:
            ValueError: See the member.
        """

    @abc.abstractmethod
    def jit_step(self, step: Step) -> CheckedStep:
        """Return the jitted (state, batch) -> (state, metrics); it donates its state.

        What `lower` and `compile` return of it has `memory_analysis`, as a compiled program of JAX.

        Args:
            step: Step with the update.
        """

    @abc.abstractmethod
    def fetches(
        self, model: ModelConfig, params: Any, execution: ExecutionConfig
    ) -> Mapping[str, float]:
        """Return how often a step brings the state of each module to the device, on average over
        its arrays, by the first name of the paths of its parameters.

        Args:
            model: Model that is trained.
            params: Nested dict of the trained parameters, or of their shapes.
            execution: Where parameters and state lie.
        """

    @abc.abstractmethod
    def update(
        self, step: Step, state: TrainState, inputs: Inputs
    ) -> tuple[Any, Any, UpdatedState]:
        """Return what is added to the parameters, their sums, and the new state of the optimiser.

        Args:
            step: Step with the update.
            state: State before the step. What lies in host memory is not fetched before loss and
                norm are known.
            inputs: Gradients and parameters.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeUpdate(Update):
    """The whole state at once, on the device."""

    name: ClassVar[str] = "whole"

    def check(self, step: Step) -> None:
        """Refuse a state that does not come to the device as a whole."""
        if step.execution.updates_in_parts:
            raise ValueError(
                f"update={self.name} has the whole optimizer state on the device, and the execution"
                f" updates it in {step.execution.update}: leave update out"
            )

    def fetches(
        self, model: ModelConfig, params: Any, execution: ExecutionConfig
    ) -> Mapping[str, float]:
        """Return 1 for each module; see the base class."""
        return dict.fromkeys(trained_modules(params), 1.0)

    def jit_step(self, step: Step) -> CheckedStep:
        """Return the step as one program; see the base class."""
        return one_program(step)

    def update(
        self, step: Step, state: TrainState, inputs: Inputs
    ) -> tuple[Any, Any, UpdatedState]:
        """Return updates, parameters and state; see the base class."""
        fetched = fetch(state.opt_state, step.execution)
        update: Any = step.optimizer.update
        updates, opt_state = update(
            inputs.grads, fetched, inputs.params, **inputs.summed.extra_args
        )
        params = jax.tree.map(lambda p, u: p + u.astype(p.dtype), inputs.params, updates)
        return updates, params, WholeState(new=opt_state, old=fetched, execution=step.execution)


def trained_modules(params: Any) -> tuple[str, ...]:
    """Return the first names of the paths of trained parameters, in their order.

    Args:
        params: Nested dict; a module without leaves is frozen.
    """
    return tuple(name for name, module in params.items() if jax.tree.leaves(module))


def state_owners(opt_state: Any, params: Any) -> list[str | None]:
    """Return the module to which each leaf of an optimiser state belongs; None for counters.

    Args:
        opt_state: State of the optimiser, or its shapes.
        params: Nested dict of the trained parameters, or of their shapes.

    Raises:
        ValueError: An array belongs to no parameter.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(opt_state)
    names = set(traverse_util.flatten_dict(params))
    return [_owner(path, leaf, names) for path, leaf in paths]


def _owner(path: Any, leaf: Any, names: set[tuple[str, ...]]) -> str | None:
    """Return the first name of the parameter whose path ends the path of a state's array."""
    keys = tuple(getattr(entry, "key", None) for entry in path)
    for start in range(len(keys)):
        if keys[start:] in names:
            return keys[start]
    if not leaf.ndim:
        return None
    raise ValueError(
        f"execution.offload.parts needs to know the parameter of each array of the optimizer's"
        f" state, and {jax.tree_util.keystr(path)} of shape {leaf.shape} belongs to none: set"
        " execution.offload.parts to 1"
    )


class CheckedStep:
    """Jitted step that checks its arguments, and the ids of the first batch and of numpy arrays."""

    def __init__(self, jitted: Any, vocab_size: int):
        self._jitted = jitted
        self._vocab_size = vocab_size
        self._has_run = False
        self.lower = jitted.lower
        self.trace = jitted.trace

    def __call__(self, state: Any, batch: Any) -> Any:
        """Return the next state and metrics."""
        # Checks calls of users: a run has its step compiled ahead, except with weights in 4 bits.
        if not isinstance(state, TrainState):
            raise ValueError(f"state has type {type(state).__name__}: give that of init_state")
        check_batch(batch, self._vocab_size, has_ids=not self._has_run)
        self._has_run = True
        return self._jitted(state, batch)


def one_program(step: Step) -> CheckedStep:
    """Return the jitted (state, batch) -> (state, metrics) of a step in one program.

    Args:
        step: Step to compile.
    """

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        state, metrics, _ = step(state, batch)
        return state, metrics

    return CheckedStep(jax.jit(run, donate_argnums=0), step.model.vocab_size)


def update_of(execution: ExecutionConfig) -> Update:
    """Return the update that an execution asks for.

    Args:
        execution: Where parameters and the state of the optimiser lie.
    """
    return choice("update", execution.update)()


def update_params(
    step: Step, state: TrainState, summed: GradientSums, clipped: Clipped
) -> UpdatedParams:
    """Apply the optimiser to gradients and parameters sharded like its state.

    Args:
        step: Model, optimiser, groups of the parameters, and layout.
        state: State before the step.
        summed: Loss, and further arguments of the optimiser's update.
        clipped: Gradients, laid out as the parameters.
    """
    model = step.model
    execution = step.execution
    table = step.table
    grads = clipped.grads
    old = state.params if table is None else table.select_trained(state.params)
    is_away = execution.parameter_memory == "host"
    if is_away:  # the layouts of parameters and state are one
        trained = old
    else:
        cut = partial(lay_out, model, rules=execution.state_layout.optimizer)
        trained = cut(old)
        grads = cut(grads)
    inputs = Inputs(grads, trained, summed, clipped)
    updates, params, new = step.updater.update(step, state, inputs)
    if is_away:
        updates = None
    else:
        params = jax.tree.map(place_like, params, old)
    if table is not None and table.has_frozen:
        params = table.merge(params, state.params)
        if updates is not None:
            updates = table.merge(updates, jax.tree.map(jnp.zeros_like, state.params))
    return UpdatedParams(updates, params, new)
