# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Low-rank additions to the matrices of grouped_swiglu, and a matrix with one.

y = x W + s (x A) B        LoRA (arXiv 2106.09685), for each group

d x = d y W^T + s (d y B^T) A^T
d A = x^T s (d y B^T)    d B = s u    d s = sum of u * B    u = (x A)^T d y
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.grouped_matmul.layout import matrix_of


class LowRankFactors(NamedTuple):
    """A low-rank addition to the matrices of all groups."""

    down: Float[Array, "G k r"]
    """A, in the dtype of the rows."""
    up: Float[Array, "G r n"]
    """B, in the dtype of the rows."""
    scale: Float[Array, ""]
    """s."""


class Additions(NamedTuple):
    """The additions to both matrices, None where there is none."""

    gate_up: LowRankFactors | None = None
    """Addition to the gate and up projection, whose outputs begin with those of the gate."""
    down: LowRankFactors | None = None
    """Addition to the down projection."""


NO_ADDITIONS = Additions()


class AddedMatrix(NamedTuple):
    """Matrices of groups with their low-rank additions, which are never added to them.

    A gradient is a record of the same kind, in float32.
    """

    weight: Any
    """W [G k n]."""
    down: Any = None
    """A [G k r]; None without an addition."""
    up: Any = None
    """B [G r n]."""
    scale: Any = None
    """s [G 1 1], once for each group, which has a gradient of its own."""

    @classmethod
    def of_factors(
        cls, weight: Float[Array, "G k n"], factors: LowRankFactors | None
    ) -> AddedMatrix:
        """Return the matrices with an addition.

        Args:
            weight: W.
            factors: The addition, or None.
        """
        if factors is None:
            return cls(weight)
        scale = jnp.broadcast_to(factors.scale, (weight.shape[0], 1, 1))
        return cls(weight, factors.down, factors.up, scale)

    def of(self, group: Int[Array, ""]) -> AddedMatrix:
        """Return the matrix of one group."""
        return jax.tree.map(lambda leaf: matrix_of(leaf, group), self)

    def times(self, x: Float[Array, "G C k"]) -> Float[Array, "G C n"]:
        """Return the products of the rows of each group, in their dtype."""
        y = dot("crk,ckn->crn", x, self.weight).astype(x.dtype)
        if self.down is None:
            return y
        narrow = dot("crk,ckq->crq", x, self.down).astype(x.dtype)
        wide = dot("crq,cqn->crn", narrow, self.up).astype(x.dtype)
        return y + self.scale.astype(x.dtype) * wide

    def times_transposed(self, d_y: Float[Array, "G C n"]) -> Float[Array, "G C k"]:
        """Return the gradients of the rows, in their dtype."""
        d_x = dot("crn,ckn->crk", d_y, self.weight).astype(d_y.dtype)
        if self.down is None:
            return d_x
        return d_x + dot("crq,ckq->crk", self._narrow(d_y), self.down).astype(d_y.dtype)

    def gradient(self, x: Float[Array, "G C k"], d_y: Float[Array, "G C n"]) -> AddedMatrix:
        """Return the gradients of the matrices, f32."""
        d_weight = dot("crk,crn->ckn", x, d_y)
        if self.down is None:
            return AddedMatrix(d_weight)
        narrow = dot("crk,ckq->crq", x, self.down).astype(x.dtype)
        unscaled = dot("crq,crn->cqn", narrow, d_y)
        return AddedMatrix(
            d_weight,
            dot("crk,crq->ckq", x, self._narrow(d_y)),
            self.scale.astype(jnp.float32) * unscaled,
            jnp.sum(unscaled * self.up.astype(jnp.float32), axis=(1, 2), keepdims=True),
        )

    def _narrow(self, d_y: Array) -> Array:
        """Return the gradients of x A, in the dtype of those of y."""
        narrow = dot("crn,cqn->crq", d_y, self.up).astype(d_y.dtype)
        return self.scale.astype(d_y.dtype) * narrow


def dot(equation: str, x: Array, y: Array) -> Array:
    """Return the product, accumulated in float32."""
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)
