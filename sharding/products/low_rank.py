# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Products with a matrix plus a low-rank one, which is never added to it.

    y = x W + s (x A) B        LoRA (arXiv 2106.09685)

W is a floating matrix or a quantised one. The gradient of A and B needs no array of the shape of W.
Where the inputs of W are cut, those of A are, and x A is a part of a sum, as x W is; where its
outputs are cut, those of B are.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import grouped_matmul
from pallas_kernels.backend import Implementation

Axes = tuple[str | None, ...]


# Not type-checked: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """Matrix [*G *I *O], of G batch, I input and O output dimensions, and a low-rank addition."""

    weight: Any
    """W, an array or a quantised matrix."""
    down: Float[Array, "*G *I r"] | Any
    """A."""
    up: Float[Array, "*G r *O"] | Any
    """B."""
    scale: Float[Array, ""] | Any
    """s."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the matrix."""
        return self.weight.ndim

    @property
    def num_batch(self) -> int:
        """Number of batch dimensions."""
        return self.down.ndim + self.up.ndim - 2 - self.ndim

    def factors_as(self, dtype: Any) -> LowRank:
        """Return the same with factors of a dtype."""
        return dataclasses.replace(self, down=self.down.astype(dtype), up=self.up.astype(dtype))

    def with_values(self, values: Float[Array, "*G r"] | None) -> LowRank:
        """Return W + s A diag(values) B; the same when None."""
        if values is None:
            return self
        wide = values.reshape(values.shape + (1,) * (self.up.ndim - values.ndim))
        return dataclasses.replace(self, up=self.up * wide.astype(self.up.dtype))

    def axes(self, weight: Any, axes: Axes) -> LowRank:
        """Return the logical axes of all parts.

        Args:
            weight: Logical axes of the parts of W.
            axes: Logical axes of the dimensions of W.
        """
        inputs = self.down.ndim - 1
        up = (*axes[: self.num_batch], None, *axes[inputs:])
        return LowRank(weight=weight, down=(*axes[:inputs], None), up=up, scale=())

    def merged(self) -> Array:
        """Return W + s A B in the dtype of W, a floating array."""
        batch = tuple(range(self.num_batch))
        product = jax.lax.dot_general(
            self.down.astype(jnp.float32),
            self.up.astype(jnp.float32),
            (((self.down.ndim - 1,), (len(batch),)), (batch, batch)),
            preferred_element_type=jnp.float32,
        )
        added = self.scale * product
        return (self.weight.astype(jnp.float32) + added).astype(self.weight.dtype)

    def added(self, y: Array, x: Array) -> Array:
        """Return x W + s (x A) B of one device, with the inputs of the matrix last in x.

        Args:
            y: x W.
            x: Activations, in the dtype of the factors.
        """
        inputs = self.down.ndim - 1
        summed = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))
        narrow = jax.lax.dot_general(
            x, self.down, (summed, ((), ())), preferred_element_type=jnp.float32
        ).astype(x.dtype)
        last = ((narrow.ndim - 1,), (0,))
        wide = jax.lax.dot_general(
            narrow, self.up, (last, ((), ())), preferred_element_type=jnp.float32
        )
        return y + (self.scale * wide).astype(y.dtype)

    def added_to_groups(
        self,
        y: Float[Array, "R n"],
        rows: Float[Array, "R k"],
        group_sizes: Int[Array, " G"],
        implementation: Implementation | None,
    ) -> Float[Array, "R n"]:
        """Return y plus s times the rows multiplied with the factors of their group.

        Args:
            y: Rows times the matrix of their group.
            rows: Rows sorted by group.
            group_sizes: Number of rows of each group.
            implementation: Implementation of `grouped_matmul`.
        """
        groups, rank = self.down.shape[0], self.down.shape[-1]
        down = self.down.reshape(groups, math.prod(self.down.shape[1:-1]), rank)
        up = self.up.reshape(groups, rank, math.prod(self.up.shape[2:]))
        narrow = grouped_matmul(rows, down, group_sizes, implementation=implementation)
        wide = grouped_matmul(narrow, up, group_sizes, implementation=implementation)
        return y + self.scale.astype(y.dtype) * wide
