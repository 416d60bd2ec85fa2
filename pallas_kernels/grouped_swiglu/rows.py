# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Indices of the rows of grouped_swiglu by token, and the name of what it keeps of each row.

    rows[r] = tokens[sources[r]]        sums[t] = sum over k of rows[places[t, k]]

Each is the transpose of the other, and so the gradient of the other: a scatter-add, which is slow
on accelerators and on CPUs, is never needed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int

HIDDEN = "grouped_swiglu_hidden"
"""Name for `jax.checkpoint` of the gate and up projection of the rows, before the activation, which
the backward pass finds; what else it needs follows."""


class RowIndices(NamedTuple):
    """Tokens of the rows and rows of the tokens."""

    sources: Int[Array, " R"]
    """Token of each row; any token past the groups."""
    places: Int[Array, "T K"]
    """Rows of each token; R, or a row past the groups, where it has fewer than K."""

    def rows_of(self, tokens: Float[Array, "T k"]) -> Float[Array, "R k"]:
        """Return one row for each source; its gradient reads no row past the groups.

        Args:
            tokens: Array that the sources count.
        """
        return _rows_of(tokens, self)

    def sums_of(self, rows: Float[Array, "R k"]) -> Float[Array, "T k"]:
        """Return the sum of the rows of each token, taken in float32.

        Args:
            rows: Rows that are 0 past the groups.
        """
        return _sums_of(rows, self)


@jax.custom_vjp
def _rows_of(tokens: Array, indices: RowIndices) -> Array:
    return tokens[indices.sources]


@jax.custom_vjp
def _sums_of(rows: Array, indices: RowIndices) -> Array:
    by_token = rows.at[indices.places].get(mode="fill", fill_value=0)
    return by_token.astype(jnp.float32).sum(1).astype(rows.dtype)


_rows_of.defvjp(
    lambda tokens, indices: (_rows_of(tokens, indices), indices),
    lambda indices, gradient: (_sums_of(gradient, indices), None),
)
_sums_of.defvjp(
    lambda rows, indices: (_sums_of(rows, indices), indices),
    lambda indices, gradient: (_rows_of(gradient, indices), None),
)
