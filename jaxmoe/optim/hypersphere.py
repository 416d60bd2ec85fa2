# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Steps along the Frobenius sphere on which each matrix begins, and AdamH.

    R  = ||W_0||                              once, from the initial weights; part of the state
    W' = (1 - lr * decay) W - lr * R * U / ||U||
    W  = R * W' / ||W'||

U is Muon's orthogonal direction (MuonH) or Adam's (AdamH). Before the projection a step is lr of
the matrix's own norm, so lr is an angle: atan(lr) if U is orthogonal to W. The norm does not
drift, because R is stored and not measured anew; decay only lengthens the tangent step, a change
of the second order in lr. A matrix whose U is exactly zero (an expert without tokens) does not
move. A matrix whose R is zero cannot move either: `init` refuses it if its values are concrete,
`MuonHConfig.build` if it is declared to start at zero, and it stays zero, finite, if `init` is
traced.

The sphere is per matrix. `sphere="stack"` takes one norm over all experts of a layer (every batch
dimension but the first), as HyperP's code does with a fused expert tensor; there the norm depends
on the number of devices that share the experts, here it does not.

Sources: arXiv 2603.28743, equation 2, after Wen et al. (hyperball); its code divides by norms
clamped from below at 1e-8, as here for U.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jaxmoe.optim.adamw import adamw
from jaxmoe.optim.matrices import Matrix, beside, matrices_of, spell_path, stacked_axes
from jaxmoe.optim.steps import (
    Number,
    Rate,
    check_numbers,
    divides_safely,
    spread,
    standard_promotion,
)

Sphere = Literal["matrix", "stack"]


class SphereState(NamedTuple):
    """State of `on_sphere`."""

    count: Int[Array, ""]
    radius: Any
    """Tree like the parameters, float32, with size 1 in the dimensions of each norm."""


def on_sphere(
    learning_rate: Rate,
    *,
    matrix_axes: Any = (-2, -1),
    sphere: Sphere = "matrix",
    weight_decay: Any = 0.0,
    multiplier: Any = 1.0,
    name: str,
) -> optax.GradientTransformation:
    """Return the transformation from directions to steps along each matrix's sphere.

    Args:
        learning_rate: A number, or a function of the optimiser's step.
        matrix_axes: Dimensions that form the matrices; see `jaxmoe.optim.matrices`.
        sphere: One sphere per matrix, or one for all experts of a layer.
        weight_decay: Decay, times the learning rate; a number or a tree like the parameters.
        multiplier: Factor on the learning rate of the directions; a number or a tree.
        name: Name of the optimiser, for errors.

    Raises:
        ValueError: An unknown sphere; at `init` a parameter that is not a matrix, or a zero matrix.
    """
    if sphere not in ("matrix", "stack"):
        raise ValueError(f"sphere={sphere!r} must be matrix or stack")

    def init(params: Any) -> SphereState:
        matrices = matrices_of(params, matrix_axes, name)
        radius = jax.tree.map(lambda p, m: _norm(p, m, sphere), params, matrices)
        jax.tree_util.tree_map_with_path(
            lambda path, r, p: _refuse_zero(path, r, p, name), radius, params
        )
        return SphereState(count=jnp.zeros((), jnp.int32), radius=radius)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, SphereState]:
        if params is None:
            raise ValueError(f"{name} moves matrices on spheres: call update(grads, state, params)")
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate

        def step(u: Array, w: Array, r: Array, matrix: Matrix, factor: Any, decay: Any) -> Array:
            w = w.astype(jnp.float32)
            length = _norm(u, matrix, sphere)
            moved = (1.0 - rate * decay) * w - (rate * factor * r / jnp.maximum(length, 1e-8)) * u
            tiny = jnp.finfo(jnp.float32).tiny
            landed = moved * (r / jnp.maximum(_norm(moved, matrix, sphere), tiny))
            return jnp.where(length == 0.0, 0.0, landed - w)

        matrices = matrices_of(updates, matrix_axes, name)
        steps = jax.tree.map(
            step,
            updates,
            params,
            state.radius,
            matrices,
            spread(multiplier, matrices),
            spread(weight_decay, matrices),
        )
        return steps, SphereState(count=state.count + 1, radius=state.radius)

    return optax.GradientTransformation(init, update)


def adamh(
    learning_rate: Rate,
    *,
    matrix_axes: Any = None,
    sphere: Sphere = "matrix",
    beta1: Number = 0.9,
    beta2: Number = 0.95,
    epsilon: Number = 1e-8,
    weight_decay: Number = 0.0,
    other_optimizer: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """Return Adam on the Frobenius sphere for the matrices of any tree, HyperP's rule for the head,
    and AdamW for the rest.

    Args:
        learning_rate: Share of the matrix's norm per step; a number, or a function of the step.
        matrix_axes: Dimensions that form the matrices, as for `muonh`.
        sphere: Matrices that share a norm, as for `muonh`.
        beta1: Decay rate for the first moment.
        beta2: Decay rate for the second moment.
        epsilon: Number added to the root of the second moment.
        weight_decay: Decay, times the learning rate; its effect is of the second order.
        other_optimizer: Transformation of vectors, scalars and parameters whose pair is None;
            `adamw` with the same numbers when None.

    Raises:
        ValueError: A moment's decay outside [0, 1), a negative weight decay; at `init` a parameter
            without the dimensions of its pair, or a zero matrix.
    """
    check_numbers(beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    steps = on_sphere(
        learning_rate,
        matrix_axes=stacked_axes(matrix_axes),
        sphere=sphere,
        weight_decay=weight_decay,
        name="adamh",
    )
    numbers = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "weight_decay": weight_decay}
    return beside(
        standard_promotion(
            optax.chain(optax.scale_by_adam(b1=beta1, b2=beta2, eps=epsilon), steps),
            stays_finite=divides_safely(epsilon),
        ),
        other_optimizer or adamw(learning_rate, **numbers),
        matrix_axes,
        "adamh",
    )


def _norm(x: Array, matrix: Matrix, sphere: Sphere) -> Float[Array, "*dims"]:
    """Return the Frobenius norm of each sphere, its dimensions kept with size 1."""
    dims = matrix.inputs + matrix.outputs + (matrix.batch[1:] if sphere == "stack" else ())
    x = x.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(x * x, axis=dims, keepdims=True))


def _refuse_zero(path: Any, radius: Array, param: Array, name: str) -> None:
    is_unknown = isinstance(radius, Tracer)
    if is_unknown or param.size == 0 or not bool(jnp.any(radius == 0.0)):
        return
    first = np.argwhere(np.asarray(radius) == 0.0)[0].tolist()
    which = f" (the first at {first} of {list(radius.shape)})" if radius.size > 1 else ""
    raise ValueError(
        f"{spell_path(path)} holds a matrix of zeros{which}, and {name} keeps the norm that a"
        f" matrix"
        " begins with, so it would stay zero: initialise it, or give it to adamw"
    )
