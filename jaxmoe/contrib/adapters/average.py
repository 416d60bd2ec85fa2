# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Averages the trained parameters over the steps of continual training.

    theta* = (1 - a) theta* + a theta        after each accepted step; theta* begins as theta
    theta  = theta*                          after the last step of the run

    fixed     a is a number
    balanced  a = 2 (1 + |g|_1) / (|theta - theta*|_1 |g - g_before|_1), of each parameter of each
              layer and expert, from its gradients in this accepted step and the one before; 0.01
              where that is not between 0 and 1

Held-out losses before the last step are those of theta.
"""

from __future__ import annotations

import abc
import dataclasses
import types
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe import combinations
from jaxmoe.adapters.factors import batch_of
from jaxmoe.parameters import ParameterSpec
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.parts.average import Average
from jaxmoe.training.parts.base import Start, StepPart

if TYPE_CHECKING:
    from jaxmoe.training.state import TrainState
    from jaxmoe.training.step import Step

_OTHERWISE = 0.01


class _Mean(Average):
    """An average with a weight of new parameters, for each layer and expert or for all."""

    __slots__ = ()

    @abc.abstractmethod
    def weight(
        self, row: ParameterSpec, far: Array, slope: Array, slope_before: Array | None
    ) -> Any:
        """Return the weight of new parameters (a).

        Args:
            row: Row of the parameter.
            far: Parameter minus its average.
            slope: Gradient.
            slope_before: Gradient in the accepted step before; None for `fixed`.
        """

    @abc.abstractmethod
    def begin(self, trained: Any) -> Any:
        """Return the state of an average before the first step: `params`, and `grads` if kept.

        Args:
            trained: Parameters that are trained.
        """

    def step_part(self, steps: int) -> Averaging:
        """Return the part of a step that keeps the average; see the base class."""
        return Averaging(config=self, steps=steps)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FixedAverageConfig(_Mean):
    """An average with a fixed weight of new parameters."""

    name: ClassVar[str] = "fixed"

    new: float = 0.01
    """Weight of the parameters of each step."""

    def __post_init__(self):
        if not 0 < self.new <= 1:
            raise ValueError(f"training.average.new={self.new} must be above 0 and at most 1")

    def begin(self, trained: Any) -> Any:
        """Return copies of the parameters; see the base class."""
        return {"params": _copies(trained)}

    def weight(
        self, row: ParameterSpec, far: Array, slope: Array, slope_before: Array | None
    ) -> float:
        """Return the weight; see the base class."""
        del row, far, slope, slope_before
        return self.new


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BalancedAverageConfig(_Mean):
    """An average with a weight that balances stability and plasticity."""

    name: ClassVar[str] = "balanced"

    def begin(self, trained: Any) -> Any:
        """Return copies of the parameters, and gradients of zero; see the base class."""
        grads = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), trained)
        return {"params": _copies(trained), "grads": grads}

    def weight(
        self, row: ParameterSpec, far: Array, slope: Array, slope_before: Array | None
    ) -> Float[Array, ...]:
        """Return the weight of each layer and expert; see the base class."""
        assert slope_before is not None  # kept by `begin`
        declaration = row.declaration
        batch = int(declaration.is_stacked) if declaration.matrix is None else len(batch_of(row))

        def size(x: Array) -> Array:
            return jnp.sum(jnp.abs(x), axis=tuple(range(batch, x.ndim)), keepdims=True)

        weight = 2.0 * (1.0 + size(slope)) / (size(far) * size(slope - slope_before))
        return jnp.where((weight > 0.0) & (weight < 1.0), weight, _OTHERWISE)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Averaging(StepPart):
    """An average of the parameters of a run."""

    name: ClassVar[str] = "average"

    config: _Mean
    steps: int | None = None
    """Step after which the average takes the place of the parameters; None for never."""

    def check(self, step: Step) -> None:
        """Refuse parameters or gradients in other memory than the device's."""
        training = types.SimpleNamespace(average=self.config)
        combinations.check(execution=step.execution, training=training)

    def init(self, start: Start) -> Any:
        """Return the average, which begins as the trained parameters."""
        return self.config.begin(start.trained)

    def after(self, step: Step, before: TrainState, after: TrainState, grads: Any) -> TrainState:
        """Return the training state with the average after an accepted step."""
        del before
        table = step.table or parameter_table(step.model)
        trained = table.select_trained(after.params)
        average = self.own_state(after)
        rows = table.select_trained(table.tree(lambda row: row))
        slopes = average.get("grads")
        earlier = jax.tree.map(lambda _: None, trained) if slopes is None else slopes

        def move(row: ParameterSpec, mean: Array, new: Array, slope: Array, last: Any) -> Array:
            far = new.astype(jnp.float32) - mean
            weight = self.config.weight(row, far, slope.astype(jnp.float32), last)
            # The same sum as in `optax.ema`.
            return weight * new.astype(jnp.float32) + (1.0 - weight) * mean

        trees = (average["params"], trained, grads, earlier)
        state = {"params": jax.tree.map(move, rows, *trees, is_leaf=_is_row)}
        if slopes is not None:
            state["grads"] = jax.tree.map(lambda new: new.astype(jnp.float32), grads)
        return self.with_state(after, state)

    def settle(self, step: Step, before: TrainState, after: TrainState) -> TrainState:
        """Return the training state with the average as its parameters, after the last step."""
        del before
        if self.steps is None:
            return after
        table = step.table or parameter_table(step.model)
        is_last = after.step >= self.steps
        params = jax.tree.map(
            lambda mean, new: jnp.where(is_last, mean.astype(new.dtype), new),
            self.own_state(after)["params"],
            table.select_trained(after.params),
        )
        return dataclasses.replace(after, params=table.merge(params, after.params))


def _copies(trained: Any) -> Any:
    """Return copies in f32: a step donates the parameters as well."""
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), trained)


def _is_row(node: Any) -> bool:
    return isinstance(node, ParameterSpec)
