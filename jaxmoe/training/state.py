# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`TrainState`: everything that training carries from step to step, as one pytree."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.optim.groups import train_only
from jaxmoe.scaling.initialize import init_params, lay_out, parameter_table
from jaxmoe.scaling.parameterization import Parameterization
from jaxmoe.training.guard import no_norms
from jaxmoe.training.host_arrays import layers_to_host
from jaxmoe.training.parts.adapter_rule import AdapterRule
from jaxmoe.training.parts.base import Start, StepPart, init_parts

if TYPE_CHECKING:
    from jaxmoe.training.estimators.base import Gradients

GRADIENTS: Final = "gradients"
"""Key of the state of a member of `Gradients` in `TrainState.parts`."""


# Not checked at run time: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@struct.dataclass
class TrainState:
    """State that a step reads and writes."""

    step: Int[Array, ""]
    """Batches consumed, including those of refused steps: the data position, together with the rows
    that a run skipped."""
    params: Any
    opt_state: Any
    router_state: Any
    """Router state, stacked over MoE layers; an empty dict without state."""
    rng: Key[Array, ""]
    """Key of the run; constant, a step folds its number into it."""
    skipped: Int[Array, ""]
    """Steps that the guard refused, in total."""
    skipped_in_a_row: Int[Array, ""]
    """Steps that the guard refused since the last good one."""
    recent_norms: Float[Array, " window"] | None = None
    """Gradient norms of the last accepted steps, the newest last, 0 for none; None if they are not
    kept. See `jaxmoe/training/guard.py`."""
    parts: dict[str, Any] = struct.field(default_factory=dict)
    """States of the parts of the step by name (`jaxmoe/training/parts/base.py`), and that of how it
    gets its gradient (`jaxmoe/training/estimators/base.py`)."""


def init_state(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    key: Key[Array, ""],
    *,
    execution: ExecutionConfig | None = None,
    parameterization: Parameterization | None = None,
    mesh: Mesh | None = None,
    gradients: Gradients | None = None,
    parts: Sequence[StepPart] = (),
) -> TrainState:
    """Return the state before the first step.

    Args:
        model: Model to train.
        optimizer: Optax transformation; its state follows the layout of the parameters.
        key: Key of the initial values and, folded, of the randomness of the run.
        execution: Rules and dtype of the parameters.
        parameterization: Initial scale per role; standard when None.
        mesh: Mesh from `sharding.make_mesh`, current when the state is used; one device when None.
        gradients: How a step gets its gradient, which may have a state; backpropagation when None.
        parts: Parts of the step beside those that the model brings.
    """
    options = InitOptions(
        execution=execution or ExecutionConfig(),
        parameterization=parameterization,
        mesh=mesh,
        gradients=gradients,
        parts=tuple(parts),
    )
    return initializer(model, optimizer, options)(key)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InitOptions:
    """Where and how a state before the first step is made."""

    execution: ExecutionConfig
    """Rules and dtype of the parameters."""
    parameterization: Parameterization | None = None
    """Initial scale per role; standard when None."""
    mesh: Mesh | None = None
    """Mesh of the state; one device when None."""
    gradients: Gradients | None = None
    """How a step gets its gradient; backpropagation when None."""
    parts: tuple[StepPart, ...] = ()
    """Parts of the step beside those that the model brings."""


def initializer(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    options: InitOptions,
) -> Callable[[Key[Array, ""]], TrainState]:
    """Return the function from a key to the state before the first step, compiled once.

    Args:
        model: Model to train.
        optimizer: Optax transformation.
        options: Layout, initial scale and parts of the step.
    """
    execution = options.execution
    mesh = options.mesh

    @jax.jit
    def rest(params: Any, key: Key[Array, ""]) -> TrainState:
        return state_around(
            model, optimizer, execution, params, key, options.gradients, options.parts
        )

    def begin(key: Key[Array, ""]) -> TrainState:
        params = init_params(
            model,
            jax.random.fold_in(key, 0),
            parameterization=options.parameterization,
            mesh=mesh,
            rules=execution.axis_rules,
            dtype=execution.precision.parameter_dtype,
            on_host=layers_on_host(model, execution),
        )
        if mesh is None:
            return rest(params, key)
        with jax.set_mesh(mesh):
            return rest(params, key)

    return begin


def state_around(
    model: ModelConfig,
    optimizer: optax.GradientTransformation | None,
    execution: ExecutionConfig,
    params: Any,
    key: Key[Array, ""],
    gradients: Gradients | None = None,
    parts: Sequence[StepPart] = (),
) -> TrainState:
    """The state before the first step of parameters that are there.

    Args:
        model: what is trained.
        optimizer: whose state follows the layout; None: there will be no training.
        execution: with the layout.
        params: of the model.
        key: as for `init_state`.
        gradients: How a step gets its gradient, which may have a state; backpropagation when None.
        parts: Parts of the step beside those that the model brings.
    """
    opt_state = {}
    states = {}
    if optimizer is not None:
        if model.adapter is not None:
            adapter_key = jax.random.fold_in(key, 3)
            params = model.adapter.begin(params, model.layer_numbers, adapter_key)
        optimizer = trained_part(model, optimizer)
        trained = params if model.adapter is None else parameter_table(model).select_trained(params)
        trained = jax.device_put(trained, jax.memory.Space.Device)
        start = Start(model, execution, params, trained=trained, key=key)
        states = init_parts((*model_parts(model), *parts), start)
        estimator_state = None if gradients is None else gradients.init(parameter_table(model))
        states |= {} if estimator_state is None else {GRADIENTS: estimator_state}
        opt_state = optimizer.init(lay_out(model, trained, rules=execution.state_layout.optimizer))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=layers_to_host(params, layers_on_host(model, execution)),
        opt_state=put_away(opt_state, execution),
        router_state=initial_router_state(model),
        rng=jax.random.fold_in(key, 1),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
        recent_norms=no_norms(),
        parts=states,
    )


def model_parts(model: ModelConfig) -> tuple[StepPart, ...]:
    """Return the parts of a step that a model brings.

    Args:
        model: Model to train.
    """
    return () if model.adapter is None else (AdapterRule(adapter=model.adapter),)


def trained_part(
    model: ModelConfig, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return the optimiser without state for what an adapter freezes.

    Args:
        model: Model to train.
        optimizer: Optax transformation for all parameters, or already without.
    """
    return optimizer if model.adapter is None else train_only(parameter_table(model), optimizer)


def layers_on_host(model: ModelConfig, execution: ExecutionConfig) -> frozenset[str]:
    """Return the names of the scans whose parameters lie in host memory; see
    `OffloadConfig.parameters`."""
    is_away = execution.parameter_memory == "host"
    return frozenset(scan.name for scan in model.scans if is_away)


def put_away(opt_state: Any, execution: ExecutionConfig) -> Any:
    """Return the optimiser state in its memory between steps; see
    `OffloadConfig.optimizer`."""
    return _move(opt_state, execution, jax.memory.Space.Host)


def fetch(opt_state: Any, execution: ExecutionConfig) -> Any:
    """Return the optimiser state on the device, for an update."""
    return _move(opt_state, execution, jax.memory.Space.Device)


def _move(opt_state: Any, execution: ExecutionConfig, where: jax.memory.Space) -> Any:
    if execution.optimizer_memory == "device":
        return opt_state
    # Counters stay on the device: a program cannot branch or index by values in host memory.
    return jax.tree.map(lambda leaf: jax.device_put(leaf, where) if leaf.ndim else leaf, opt_state)
