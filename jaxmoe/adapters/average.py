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
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.adapters.base import State
from jaxmoe.adapters.factors import batch_of
from jaxmoe.catalog import Registry
from jaxmoe.execution import ExecutionConfig
from jaxmoe.parameters import ParameterSpec, ParameterTable

_OTHERWISE = 0.01


class Average(abc.ABC):
    """Base class of the configs of averages."""

    __slots__ = ()

    name: ClassVar[str]
    """Key in the registry."""
    reads_gradients: ClassVar[bool] = False
    """Whether the weight depends on gradients."""

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

    def begin(self, trained: Any) -> Any:
        """Return `TrainState.average` before the first step.

        Args:
            trained: Parameters that are trained.
        """
        # Copies: a step donates the parameters as well.
        found = {"params": jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), trained)}
        if self.reads_gradients:
            found["grads"] = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), trained)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FixedAverageConfig(Average):
    """An average with a fixed weight of new parameters."""

    name: ClassVar[str] = "fixed"

    new: float = 0.01
    """Weight of the parameters of each step."""

    def __post_init__(self):
        if not 0 < self.new <= 1:
            raise ValueError(f"training.average.new={self.new} must be above 0 and at most 1")

    def weight(
        self, row: ParameterSpec, far: Array, slope: Array, slope_before: Array | None
    ) -> float:
        """Return the weight; see the base class."""
        del row, far, slope, slope_before
        return self.new


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BalancedAverageConfig(Average):
    """An average with a weight that balances stability and plasticity."""

    name: ClassVar[str] = "balanced"
    reads_gradients: ClassVar[bool] = True

    def weight(
        self, row: ParameterSpec, far: Array, slope: Array, slope_before: Array | None
    ) -> Float[Array, ...]:
        """Return the weight of each layer and expert; see the base class."""
        assert slope_before is not None  # kept by `begin`
        given = row.declaration
        batch = int(given.is_stacked) if given.matrix is None else len(batch_of(row))

        def size(x: Array) -> Array:
            return jnp.sum(jnp.abs(x), axis=tuple(range(batch, x.ndim)), keepdims=True)

        found = 2.0 * (1.0 + size(slope)) / (size(far) * size(slope - slope_before))
        return jnp.where((found > 0.0) & (found < 1.0), found, _OTHERWISE)


AVERAGES = Registry("average")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Averaging:
    """An average of the parameters of a run."""

    config: Average
    steps: int | None = None
    """Step after which the average takes the place of the parameters; None for never."""

    def check_execution(self, execution: ExecutionConfig) -> None:
        """Refuse parameters or gradients in other memory.

        Args:
            execution: How the run is computed.

        Raises:
            ValueError: They are not on the device.
        """
        for field in ("optimizer_memory", "parameter_memory"):
            if (where := getattr(execution, field)) != "device":
                raise ValueError(
                    f"execution.{field}={where}: training.average:{self.config.name} reads"
                    f" parameters and gradients after each step: set execution.{field} to device,"
                    " or leave out training.average"
                )

    def after_step(
        self, state: State, grads: Any, is_good: Bool[Array, ""], table: ParameterTable
    ) -> State:
        """Return the training state with the average after a step.

        Args:
            state: State after the update, or after a refusal.
            grads: Gradients, a tree like the trained parameters.
            is_good: Whether the guard accepted the step.
            table: Parameter table.
        """
        now: Any = state
        trained, average = table.trained(now.params), now.average
        rows = table.trained(table.tree(lambda row: row))
        before = average.get("grads")
        earlier = jax.tree.map(lambda _: None, trained) if before is None else before

        def moved(row: ParameterSpec, mean: Array, new: Array, slope: Array, last: Any) -> Array:
            far = new.astype(jnp.float32) - mean
            weight = self.config.weight(row, far, slope.astype(jnp.float32), last)
            # The same sum as in `optax.ema`.
            after = weight * new.astype(jnp.float32) + (1.0 - weight) * mean
            return jnp.where(is_good, after, mean)

        given = (average["params"], trained, grads, earlier)
        found = {"params": jax.tree.map(moved, rows, *given, is_leaf=_is_row)}
        if before is not None:
            found["grads"] = jax.tree.map(
                lambda new, old: jnp.where(is_good, new.astype(jnp.float32), old), grads, before
            )
        params = now.params
        if self.steps is not None:
            is_last = now.step >= self.steps
            ended = jax.tree.map(
                lambda mean, new: jnp.where(is_last, mean.astype(new.dtype), new),
                found["params"],
                trained,
            )
            params = table.merged(ended, params)
        return dataclasses.replace(now, params=params, average=found)


def _is_row(node: Any) -> bool:
    return isinstance(node, ParameterSpec)
