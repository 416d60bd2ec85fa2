# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parts shared by the optax transformations: contract, checks, promotion, decoupled steps.

w = w - rate * (multiplier * direction + decay * w)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float

Number = float | Float[Array, ""]
"""A hyperparameter, which `optax.inject_hyperparams` gives as an array."""
Rate = Number | Callable[[Any], Any]
"""A learning rate, or a function of the optimiser's step."""

SMALLEST_EPSILON = 1e-15
"""Adam's directions by finite gradients are finite from this epsilon on: first moments are at most
the root of the largest float32."""


def divides_safely(epsilon: Number) -> bool:
    """Return whether an epsilon is known to keep directions finite."""
    return not isinstance(epsilon, Tracer) and bool(epsilon >= SMALLEST_EPSILON)


class LayerwiseTransformation(optax.GradientTransformation):
    """A transformation that treats each parameter, and each layer of a stack, by itself.

    Its state has counters, and arrays under the paths of the parameters to which they belong, with
    the same first dimension. Part of a state may then be updated without the rest.
    """

    __slots__ = ()


class FiniteTransformation(LayerwiseTransformation):
    """A transformation whose updates and next state are finite where its state and parameters are,
    and the norm of all gradients: none of its sums, quotients and roots can overflow.

    Parameters are in float32 or bfloat16. The guard then judges loss and norm alone, and writes
    the new state in the pass that computes it.
    """

    __slots__ = ()


class MeasuringTransformation(LayerwiseTransformation):
    """A transformation whose update takes more than gradients, state and parameters.

    A member of `Backward` measures its further arguments (`GradientSums.extra_args`).
    """

    __slots__ = ()

    backward: ClassVar[str]
    """Name of the member."""


def backward_name(optimizer: optax.GradientTransformation) -> str | None:
    """Return the member of `Backward` that a transformation needs; None for any.

    Args:
        optimizer: Any optax transformation.
    """
    return optimizer.backward if isinstance(optimizer, MeasuringTransformation) else None


def check_numbers(prefix: str = "", **values: Any) -> None:
    """Refuse hyperparameters outside their range; names without a rule are not checked, nor are
    values that a trace has not computed yet, as of `optax.inject_hyperparams` in a jitted step.

    Args:
        prefix: Text before the name in the message, such as "optimizer.".
        **values: Hyperparameters by name.

    Raises:
        ValueError: A number is out of range; names it, the rule and the value.
    """
    for name, value in values.items():
        if isinstance(value, Tracer):
            continue
        where = f"{prefix}{name}={value}"
        match name:
            case "learning_rate" | "epsilon" | "adamw_ratio":
                if not 0.0 < value < float("inf"):
                    raise ValueError(f"{where} must be above 0, and finite")
            case "beta1" | "beta2" | "momentum":
                if not 0.0 <= value < 1.0:
                    raise ValueError(f"{where} must lie in [0, 1)")
            case "weight_decay":
                if not 0.0 <= value < float("inf"):
                    raise ValueError(f"{where} must be 0 or more, and finite")


def standard_promotion(
    inner: optax.GradientTransformation, *, stays_finite: bool = False
) -> LayerwiseTransformation:
    """Return the transformation under JAX's standard dtype promotion, with its state in f32.

    optax multiplies Python scalars, strongly typed counters and arrays of other dtypes, which
    strict promotion refuses, and keeps the second moment of a bfloat16 parameter in bfloat16.

    Args:
        inner: Transformation to wrap; it treats each layer by itself.
        stays_finite: Whether the result is a `FiniteTransformation`.
    """

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return inner.init(_widen(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(_widen(updates), state, params, **extra)

    kind = FiniteTransformation if stays_finite else LayerwiseTransformation
    if isinstance(inner, MeasuringTransformation):
        kind = type(inner)
    return kind(init, update)


def straight_steps(
    directions: optax.GradientTransformation,
    learning_rate: Rate,
    *,
    weight_decay: Any = 0.0,
    multiplier: Any = None,
) -> optax.GradientTransformation:
    """Return the transformation that takes decoupled steps along directions.

    Args:
        directions: Transformation from gradients to directions.
        learning_rate: A number, or a function of the optimiser's step.
        weight_decay: Factor on the parameter beside its direction: a number, a tree like the
            parameters, or a function from the directions to such a tree. An update reads parameters
            only where one is not 0.
        multiplier: Tree of factors on the directions; None multiplies by nothing.
    """

    def scale(updates: Any, params: Any) -> Any:
        del params
        return jax.tree.map(lambda f, u: u if _is(f, 1.0) else f * u, multiplier, updates)

    def add_decay(updates: Any, params: Any) -> Any:
        decays = weight_decay(updates) if callable(weight_decay) else spread(weight_decay, updates)
        if params is None and all(_is(decay, 0.0) for decay in jax.tree.leaves(decays)):
            return updates
        if params is None:
            raise ValueError("weight decay reads parameters: call update(grads, state, params)")
        return jax.tree.map(
            lambda d, u, p: u if _is(d, 0.0) else u + d * p, decays, updates, params
        )

    scaled = [] if multiplier is None else [optax.stateless(scale)]
    return optax.chain(
        directions,
        *scaled,
        optax.stateless(add_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def spread(value: Any, tree: Any) -> Any:
    """Return a tree with a number at every leaf; a value that is a tree already stays.

    Args:
        value: A number, an array without dimensions, or a tree.
        tree: Structure of the result.
    """
    is_one = isinstance(value, int | float) or (
        isinstance(value, jax.Array | np.ndarray) and value.ndim == 0
    )
    return jax.tree.map(lambda _: value, tree) if is_one else value


def _widen(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def _is(value: Any, number: float) -> bool:
    return isinstance(value, float) and value == number
