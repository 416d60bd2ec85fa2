# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Matrices on the Frobenius sphere: MuonH and AdamH.

    R  = ||W_0||                              once, from the initial weights; part of the state
    W' = (1 - lr * decay) W - lr * R * U / ||U||
    W  = R * W' / ||W'||

U is Muon's orthogonal direction (MuonH) or Adam's (AdamH). Before the projection a step is lr of
the matrix's own norm, so lr is an angle: atan(lr) where U is orthogonal to W. The norm never
drifts, because R is stored and not measured anew; decay only lengthens the tangent step, a change
of the second order in lr. A matrix whose U is exactly zero (an expert that has seen no token) does
not move, and neither does one whose R is zero: on a sphere of radius 0 there is nowhere to go. Such
a matrix is refused by `init` where its values can be seen, by `MuonHConfig.build` where it is
declared to start at zero, and stays zero, finite, where `init` is traced.

The sphere is per matrix. `sphere="stack"` takes one norm over all experts of a layer (every batch
dimension but the first), which is what HyperP's code does with a fused expert tensor; there it
depends on how many devices share the experts, here it does not.

Sources: arXiv 2603.28743, equation 2, after Wen et al. (hyperball); its code divides by norms
clamped from below at 1e-8, as here for U.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jaxmoe.optim.adamw import check_moments, check_weight_decay, standard_promotion
from jaxmoe.optim.matrices import Matrix, matrices_of, spelled
from jaxmoe.optim.muon import ComputeDtype, Form, scale_by_muon
from jaxmoe.optim.newton_schulz import Coefficients
from sharding.products.whole_matrices import MatrixLayout

Sphere = Literal["matrix", "stack"]


class SphereState(NamedTuple):
    """What the sphere keeps."""

    count: Int[Array, ""]
    radius: Any
    """As the parameters, float32, with 1 in place of every dimension that a norm is taken over."""


def on_sphere(
    learning_rate: float | Callable[[Any], Any],
    *,
    matrix_axes: Any = (-2, -1),
    sphere: Sphere = "matrix",
    weight_decay: Any = 0.0,
    multiplier: Any = 1.0,
    name: str,
) -> optax.GradientTransformation:
    """Directions to steps along the sphere on which each matrix began.

    Args:
        learning_rate: a number, or a function of the optimiser's step.
        matrix_axes: see `jaxmoe.optim.matrices`.
        sphere: one per matrix, or one for all experts of a layer.
        weight_decay: times the learning rate; a number or a tree like the parameters.
        multiplier: on the learning rate of the directions; a number or a tree.
        name: of the optimiser, for errors.

    Raises:
        ValueError: an unknown sphere; at `init` a parameter that is no matrix, or a zero matrix.
    """
    if sphere not in ("matrix", "stack"):
        raise ValueError(f"sphere={sphere!r} must be matrix or stack")

    def init(params: Any) -> SphereState:
        found = matrices_of(params, matrix_axes, name)
        radius = jax.tree.map(lambda p, m: _norm(p, m, sphere), params, found)
        jax.tree_util.tree_map_with_path(lambda path, r: _refuse_zero(path, r, name), radius)
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

        found = matrices_of(updates, matrix_axes, name)
        steps = jax.tree.map(
            step,
            updates,
            params,
            state.radius,
            found,
            _spread(multiplier, found),
            _spread(weight_decay, found),
        )
        return steps, SphereState(count=state.count + 1, radius=state.radius)

    return optax.GradientTransformation(init, update)


def muonh(
    learning_rate: float | Callable[[Any], Any],
    *,
    matrix_axes: Any = (-2, -1),
    sphere: Sphere = "matrix",
    momentum: float = 0.95,
    nesterov: bool = True,
    form: Form = "sum",
    coefficients: Coefficients = "dion",
    weight_decay: float = 0.0,
    epsilon: float = 1e-8,
    dtype: ComputeDtype = "auto",
    layout: MatrixLayout = "spread",
) -> optax.GradientTransformation:
    """Muon on the Frobenius sphere, for a tree of matrices; there is no scale, it would cancel.

    Args:
        learning_rate: of the matrix's norm, per step; a number, or a function of the step.
        matrix_axes: which dimensions form the matrix; a pair, or a tree of pairs like the
            parameters. All others count matrices.
        sphere: one per matrix; or "stack", one over all batch dimensions but the first, which
            counts layers: it changes nothing in [E in out].
        momentum: of the gradients.
        nesterov: look ahead by one step.
        form: of the momentum, "sum" or "ema".
        coefficients: of Newton-Schulz, "dion" or "standard".
        weight_decay: times the learning rate; of no effect but to second order.
        epsilon: added to the norm before Newton-Schulz.
        dtype: of Newton-Schulz; auto: bfloat16 on accelerators, float32 on the CPU.
        layout: which device orthogonalises what, on an Explicit mesh.

    Raises:
        ValueError: as for `muon`, and at `init` a zero matrix.
    """
    check_weight_decay(weight_decay)
    direction = scale_by_muon(
        matrix_axes=matrix_axes,
        momentum=momentum,
        nesterov=nesterov,
        form=form,
        coefficients=coefficients,
        epsilon=epsilon,
        dtype=dtype,
        layout=layout,
        name="muonh",
    )
    steps = on_sphere(
        learning_rate,
        matrix_axes=matrix_axes,
        sphere=sphere,
        weight_decay=weight_decay,
        name="muonh",
    )
    return standard_promotion(optax.chain(direction, steps))


def adamh(
    learning_rate: float | Callable[[Any], Any],
    *,
    matrix_axes: Any = (-2, -1),
    sphere: Sphere = "matrix",
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Adam on the Frobenius sphere, for a tree of matrices: HyperP's rule for the head.

    Args:
        learning_rate: of the matrix's norm, per step; a number, or a function of the step.
        matrix_axes: as for `muonh`.
        sphere: as for `muonh`.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the root of the second moment.
        weight_decay: times the learning rate; of no effect but to second order.

    Raises:
        ValueError: a moment's decay outside [0, 1), a negative weight decay; at `init` a parameter
            that is no matrix, or a zero matrix.
    """
    check_moments(beta1=beta1, beta2=beta2)
    check_weight_decay(weight_decay)
    steps = on_sphere(
        learning_rate,
        matrix_axes=matrix_axes,
        sphere=sphere,
        weight_decay=weight_decay,
        name="adamh",
    )
    return standard_promotion(
        optax.chain(optax.scale_by_adam(b1=beta1, b2=beta2, eps=epsilon), steps)
    )


def _norm(x: Array, matrix: Matrix, sphere: Sphere) -> Float[Array, "*dims"]:
    """Frobenius norm per sphere, with the dimensions it is taken over kept as 1."""
    dims = matrix.inputs + matrix.outputs + (matrix.batch[1:] if sphere == "stack" else ())
    x = x.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(x * x, axis=dims, keepdims=True))


def _spread(value: Any, tree: Any) -> Any:
    is_one = isinstance(value, int | float)
    return jax.tree.map(lambda _: value, tree) if is_one else value


def _refuse_zero(path: Any, radius: Array, name: str) -> None:
    if isinstance(radius, Tracer) or not bool(jnp.any(radius == 0.0)):
        return
    first = np.argwhere(np.asarray(radius) == 0.0)[0].tolist()
    which = f" (the first at {first} of {list(radius.shape)})" if radius.size > 1 else ""
    raise ValueError(
        f"{spelled(path)} holds a matrix of zeros{which}, and {name} keeps the norm that a matrix"
        " begins with, so it would stay zero: initialise it, or give it to adamw"
    )
