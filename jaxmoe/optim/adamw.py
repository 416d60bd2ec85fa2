# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""AdamW with decoupled weight decay on matrices only (arXiv 1711.05101).

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
    w = w - lr * (m_hat / (sqrt(v_hat) + epsilon) + decay * w)

optax does the arithmetic; this room adds the matrix mask and keeps the state in f32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def standard_promotion(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation under JAX's standard dtype promotion, with its state in f32.

    optax multiplies Python scalars, strongly typed counters and arrays of other dtypes, which
    strict promotion (the setting of our tests, and of some users) refuses; and it would keep the
    second moment of a bfloat16 parameter in bfloat16.
    """

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return inner.init(_widen(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(_widen(updates), state, params)

    return optax.GradientTransformation(init, update)


def _widen(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def check_moments(**decays: float) -> None:
    """Refuses what is no decay of a moment."""
    for name, decay in decays.items():
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"{name}={decay} must lie in [0, 1)")


def check_weight_decay(weight_decay: float) -> None:
    """Refuses what is no weight decay."""
    if not 0.0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay={weight_decay} must be 0 or more, and finite")


def adamw(
    learning_rate: float | Callable[[Any], Any],
    *,
    matrix_axes: Any = (-2, -1),
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """AdamW whose weight decay spares vectors of gains.

    Args:
        learning_rate: a number, or a function of the optimiser's step.
        matrix_axes: the two axes that form a matrix in every parameter of two dimensions and
            more, or a tree like the parameters with such a pair, or None for a vector. Only
            whether there is a matrix matters here.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the root of the second moment.
        weight_decay: times the learning rate, per step, of matrices.

    Raises:
        ValueError: a moment's decay outside [0, 1), or a negative weight decay.
    """
    check_moments(beta1=beta1, beta2=beta2)
    check_weight_decay(weight_decay)

    def mask(params: Any) -> Any:
        if isinstance(matrix_axes, tuple):
            return jax.tree.map(lambda leaf: jnp.ndim(leaf) >= 2, params)
        return jax.tree.map(
            lambda axes, _: axes is not None,
            matrix_axes,
            params,
            is_leaf=lambda node: node is None or isinstance(node, tuple),
        )

    chain = optax.chain(
        optax.scale_by_adam(b1=beta1, b2=beta2, eps=epsilon),
        optax.add_decayed_weights(weight_decay, mask=mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    return standard_promotion(chain)
