# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Geometric coupling of router and experts: cosines of their weights, correlation of their scores.

For one token the gradients of an expert's gate and up neurons and of its router row are multiples
of the same x, so both accumulate the same directions. Three diagnostics of one layer's weights and
tokens; `balancers/coupling.py` is the corresponding loss.

    row similarity          mean cosine of two different router rows (a balance loss raises it)
    direction coupling      cosine of a router row and its expert's mean gate neuron, E of them
    activation correlation  Pearson's of router score and norm of the gate neurons, over tokens

Source: arXiv 2605.12476, by secondary accounts.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def row_similarity(weight: Float[Array, "*L D E"]) -> Float[Array, "*L"]:
    """Compute the mean cosine over pairs of different experts; 0 if there is one expert.

    Args:
        weight: Router matrix, a column for each expert; may be stacked over layers.
    """
    unit = _unit(weight, axis=-2)
    number = weight.shape[-1]
    # The sum over all pairs is the squared norm of the sum of the rows.
    pairs = jnp.sum(unit.sum(-1) ** 2, axis=-1) - jnp.sum(unit**2, axis=(-2, -1))
    return pairs / max(number * (number - 1), 1)


def gate_directions(gate_up: Float[Array, "*L E D 2 F"]) -> Float[Array, "*L E D"]:
    """Return the mean of each expert's gate neurons, f32."""
    return gate_up[..., 0, :].astype(jnp.float32).mean(-1)


def direction_coupling(
    weight: Float[Array, "*L D E"], directions: Float[Array, "*L E D"]
) -> Float[Array, "*L E"]:
    """Compute the cosine of each router row and the mean of its expert's gate neurons.

    Args:
        weight: Router matrix, a column for each expert; may be stacked over layers.
        directions: Means from `gate_directions`.
    """
    rows = jnp.moveaxis(_unit(weight, axis=-2), -1, -2)
    return jnp.sum(rows * _unit(directions, axis=-1), axis=-1)


def activation_correlation(
    x: Float[Array, "T D"], scores: Float[Array, "T E"], gate_up: Float[Array, "E D 2 F"]
) -> Float[Array, " E"]:
    """Compute the correlation over tokens of router score and norm of the gate neurons, per expert.

    Args:
        x: Normed input of the layer, f32.
        scores: Router scores, or any increasing function of them.
        gate_up: Expert weights, f32; all experts are evaluated on all tokens.

    Returns:
        Correlations; 0 where either does not vary.
    """
    norms = jnp.sqrt(squared_norms(x, gate_up[:, :, 0, :]))
    return correlation(scores, norms, jnp.ones(x.shape[0], bool))


def squared_norms(x: Float[Array, "T D"], gate: Float[Array, "E D F"]) -> Float[Array, "T E"]:
    """Compute the squared norm of the gate neurons of every expert for every token, f32.

    Args:
        x: Normed input of the layer.
        gate: Gate neurons, in the dtype of `x`; a part of them gives an addend.
    """
    return jnp.sum(
        jnp.einsum("td,edf->tef", x, gate, preferred_element_type=jnp.float32) ** 2, axis=-1
    )


def correlation(
    scores: Float[Array, "T E"], norms: Float[Array, "T E"], token_mask: Bool[Array, " T"]
) -> Float[Array, " E"]:
    """Compute Pearson's correlation over tokens, per expert; 0 where either does not vary.

    Args:
        scores: Router scores, f32.
        norms: Norms of the gate neurons, f32.
        token_mask: False leaves a token out.
    """
    real = token_mask.astype(jnp.float32)[:, None]
    number = jnp.maximum(real.sum(), 1.0)

    def centr(values: Array) -> Array:
        mean = jnp.sum(real * values, axis=0, keepdims=True) / number
        return real * (values - mean)

    return jnp.sum(_unit(centr(scores), axis=0) * _unit(centr(norms), axis=0), axis=0)


def _unit(values: Array, *, axis: int) -> Array:
    squares = jnp.sum(values**2, axis=axis, keepdims=True)
    return values / jnp.sqrt(jnp.maximum(squares, 1e-30))
