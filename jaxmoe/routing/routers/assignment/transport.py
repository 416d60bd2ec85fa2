# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Entropic optimal transport of tokens to experts, in the log domain.

    maximise  sum_ti plan_ti cost_ti - sum_ti plan_ti log plan_ti
    rows (tokens) sum to 1,   columns (experts) to n/E
    plan_ti = exp(cost_ti + row_t + column_i)
    Sinkhorn:  column_i = log(n/E) - logsumexp_t(cost_ti + row_t)
               row_t    = -logsumexp_i(cost_ti + column_i)         the last step: rows are exact

The number of iterations is fixed: the result depends on no tolerance, and the cost of a compiled
step is constant. A constant added to an expert's costs is absorbed by its column at once; one added
to a token's costs is absorbed by its row at convergence. With tokens on several devices an
iteration costs a pmax and a psum of E numbers.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.routing.base import RouterInputs
from jaxmoe.routing.scopes import Scope, join_scopes, scope_axes, split_scopes, total


def scalings(
    cost: Float[Array, "T E"], inputs: RouterInputs, *, scope: Scope, iterations: int
) -> Float[Array, "T E"]:
    """Compute row_t + column_i, which added to the costs gives the logarithm of the plan.

    Args:
        cost: Costs of the tokens on this device, divided by the weight of the entropy; f32. No
            gradient passes.
        inputs: Tokens; padding takes no part.
        scope: Tokens over which the plan is even.
        iterations: Sinkhorn iterations, at least 1.
    """
    extent = inputs.extent
    axes = scope_axes(inputs.extent, scope)
    is_real = split_scopes(inputs.token_mask, extent, scope)  # G, n
    cost = jax.lax.stop_gradient(cost)
    cost = jnp.where(inputs.token_mask[:, None], cost, 0.0)
    cost = split_scopes(cost, extent, scope)  # G, n, E
    row, column = sinkhorn(cost, is_real, axes=axes, iterations=iterations)
    return join_scopes(row[:, :, None] + column[:, None, :])


def sinkhorn(
    cost: Float[Array, "G n E"],
    is_real: Bool[Array, "G n"],
    *,
    axes: tuple[str, ...],
    iterations: int,
) -> tuple[Float[Array, "G n"], Float[Array, "G E"]]:
    """Compute the logarithms of the rows' and the columns' scalings.

    Args:
        cost: Costs by group, row and column, f32.
        is_real: False excludes a row from the columns' sums.
        axes: Mesh axes over which the rows of a group are spread.
        iterations: Sinkhorn iterations, at least 1.
    """
    where = is_real[:, :, None]
    # The rows absorb any constant; this one keeps both scalings small.
    constant = math.log(max(cost.shape[1], 1) / cost.shape[2])

    def column_of(scaled: Array) -> Array:
        most = jnp.max(scaled, axis=1, initial=-jnp.inf, where=where)
        most = jax.lax.pmax(most, axes) if axes else most
        most = jnp.where(jnp.isfinite(most), most, 0.0)
        terms = jnp.where(where, jnp.exp(scaled - most[:, None, :]), 0.0)
        mass = total(terms.sum(1), axes)
        # A group of padding alone has no mass and is not scaled.
        return jnp.where(mass > 0.0, constant - most - jnp.log(mass), 0.0)

    def row_of(column: Array) -> Array:
        return -jax.nn.logsumexp(cost + column[:, None, :], axis=2)

    column = jax.lax.fori_loop(
        1,
        iterations,
        lambda _, column: column_of(cost + row_of(column)[:, :, None]),
        column_of(cost),
    )
    return row_of(column), column


def check_iterations(iterations: int) -> None:
    """Check that there is at least one iteration.

    Raises:
        ValueError: there is none.
    """
    if iterations < 1:
        raise ValueError(f"router.iterations={iterations} must be at least 1")
