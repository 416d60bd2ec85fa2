# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Muon: the momentum of each matrix, orthogonalised by Newton-Schulz.

    sum (HyperP's code)   M = mu M + G              V = G + mu M
    ema (optax)           M = mu M + (1 - mu) G     V = mu M / c(t + 1) + (1 - mu) G / c(t)
    W = W - lr * (s * newton_schulz(V) + decay * W)

with c(t) = 1 - mu^t and t from 1. Without Nesterov V is M, in the second form over c(t). The forms
differ by a constant factor, which Newton-Schulz takes away, and in the mix of the first
1 / (1 - mu) steps. The scale s of a matrix of fan_in inputs and fan_out outputs:

    spectral_norm  sqrt(fan_out / fan_in)            rms_norm  0.2 sqrt(max(fan_in, fan_out))
    clip_norm      sqrt(max(1, fan_out / fan_in))    None      1

`clip_norm` is optax's width factor, `rms_norm` its `consistent_rms=0.2` (arXiv 2502.16982).

The momentum lies as the parameters lie; Newton-Schulz sees whole matrices by
`sharding.products.whole_matrices`. Sources: K. Jordan et al., Muon, 2024; arXiv 2603.28743 and its
code. Matrices on a sphere: `jaxmoe/optim/hypersphere.py`. To add a scale: a case in `shape_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from jaxmoe.optim.adamw import check_moments, check_weight_decay, standard_promotion
from jaxmoe.optim.matrices import Matrix, matrices_of
from jaxmoe.optim.newton_schulz import Coefficients, newton_schulz
from jaxmoe.precision import PrecisionPolicy
from sharding.products.whole_matrices import MatrixLayout, map_matrices

Form = Literal["sum", "ema"]
Scale = Literal["spectral_norm", "rms_norm", "clip_norm"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]


class MuonState(NamedTuple):
    """What Muon keeps."""

    count: Int[Array, ""]
    momentum: Any
    """As the parameters, float32."""


def shape_scale(scale: Scale | None, matrix: Matrix) -> float:
    """The factor on an orthogonal matrix of this shape."""
    match scale:
        case "spectral_norm":
            return math.sqrt(matrix.fan_out / matrix.fan_in)
        case "rms_norm":
            return 0.2 * math.sqrt(max(matrix.fan_in, matrix.fan_out))
        case "clip_norm":
            return math.sqrt(max(1.0, matrix.fan_out / matrix.fan_in))
        case None:
            return 1.0


def scale_by_muon(
    *,
    matrix_axes: Any = (-2, -1),
    momentum: float = 0.95,
    nesterov: bool = True,
    form: Form = "sum",
    coefficients: Coefficients = "dion",
    scale: Scale | None = None,
    epsilon: float = 1e-8,
    dtype: ComputeDtype = "auto",
    layout: MatrixLayout = "spread",
    name: str = "muon",
) -> optax.GradientTransformation:
    """Gradients to orthogonal directions; see `muon` for the arguments.

    Args:
        matrix_axes: see `jaxmoe.optim.matrices`.
        momentum: mu.
        nesterov: look ahead by one step.
        form: of the momentum.
        coefficients: of Newton-Schulz.
        scale: of the directions.
        epsilon: of Newton-Schulz.
        dtype: of Newton-Schulz.
        layout: of Newton-Schulz on a mesh.
        name: of the optimiser, for errors.
    """
    check_moments(momentum=momentum)
    for field, value, known in (
        ("form", form, get_args(Form)),
        ("coefficients", coefficients, get_args(Coefficients)),
        ("scale", scale, (*get_args(Scale), None)),
        ("layout", layout, get_args(MatrixLayout)),
    ):
        if value not in known:
            raise ValueError(f"{field}={value!r} must be one of {', '.join(map(str, known))}")

    def init(params: Any) -> MuonState:
        matrices_of(params, matrix_axes, name)  # refuses vectors
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.float32), params)
        return MuonState(count=jnp.zeros((), jnp.int32), momentum=zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        del params
        count = state.count + 1
        kept = 1.0 if form == "sum" else 1.0 - momentum
        sums = jax.tree.map(lambda m, g: momentum * m + kept * g, state.momentum, updates)
        ahead, now = 1.0, kept
        if form == "ema":
            steps = count.astype(jnp.float32)
            ahead = 1.0 / (1.0 - momentum ** (steps + (1.0 if nesterov else 0.0)))
            now = kept / (1.0 - momentum**steps)
        compute = PrecisionPolicy(compute=dtype).compute_dtype
        orthogonalise = partial(
            newton_schulz, coefficients=coefficients, epsilon=epsilon, dtype=compute
        )

        def direction(m: Array, g: Array, matrix: Matrix) -> Array:
            seen = momentum * ahead * m + now * g if nesterov else ahead * m
            whole = map_matrices(
                orthogonalise,
                jnp.asarray(seen, compute),  # before it travels
                inputs=matrix.inputs,
                outputs=matrix.outputs,
                layout=layout,
            )
            return shape_scale(scale, matrix) * whole.astype(jnp.float32)

        found = matrices_of(updates, matrix_axes, name)
        steps = jax.tree.map(direction, sums, updates, found)
        return steps, MuonState(count=count, momentum=sums)

    return optax.GradientTransformation(init, update)


def muon(
    learning_rate: float | Callable[[Any], Any],
    *,
    matrix_axes: Any = (-2, -1),
    momentum: float = 0.95,
    nesterov: bool = True,
    form: Form = "sum",
    coefficients: Coefficients = "dion",
    scale: Scale | None = "spectral_norm",
    weight_decay: float = 0.0,
    epsilon: float = 1e-8,
    dtype: ComputeDtype = "auto",
    layout: MatrixLayout = "spread",
) -> optax.GradientTransformation:
    """Muon for a tree of matrices; give vectors to `adamw`, by `optax.partition`.

    Args:
        learning_rate: a number, or a function of the optimiser's step.
        matrix_axes: which dimensions form the matrix; a pair, or a tree of pairs like the
            parameters. All others count matrices, each of which is orthogonalised by itself.
        momentum: of the gradients.
        nesterov: look ahead by one step.
        form: of the momentum, "sum" or "ema".
        coefficients: of Newton-Schulz, "dion" or "standard".
        scale: on the step, by the matrix's shape.
        weight_decay: times the learning rate, per step.
        epsilon: added to the norm before Newton-Schulz.
        dtype: of Newton-Schulz; auto: bfloat16 on accelerators, float32 on the CPU.
        layout: which device orthogonalises what, on an Explicit mesh.

    Raises:
        ValueError: a momentum outside [0, 1), a negative weight decay, an unknown name; at `init`
            a parameter that is no matrix.
    """
    check_weight_decay(weight_decay)
    chain = optax.chain(
        scale_by_muon(
            matrix_axes=matrix_axes,
            momentum=momentum,
            nesterov=nesterov,
            form=form,
            coefficients=coefficients,
            scale=scale,
            epsilon=epsilon,
            dtype=dtype,
            layout=layout,
        ),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    return standard_promotion(chain)
