# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the activations of each product: `ObservedArray` in place of a matrix.

    largest[k] = max |x[:, k]|        over the rows x that a matrix is multiplied with,
    squares[k] = sum x[:, k]^2        or this with statistic "squares"

The measurement is returned as the gradient of `largest`, whatever is differentiated: layers return
no statistic for it, and a scan over layers stacks it like other gradients. Products have no other
gradient, so that a backward pass multiplies no matrix. A matrix that is used twice adds both
measurements.

It is meant for one device: the gradient of what several devices share is a sum, not a maximum.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import grouped_matmul
from pallas_kernels.backend import Implementation
from sharding.products.wrapped import Axes, WrappedMatrix

Statistic = Literal["largest", "squares"]
"""What is measured of the activations of an input: the largest absolute value, or the sum of the
squares."""


# Not type-checked: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ObservedArray(WrappedMatrix):
    """Floating matrix whose activations are measured."""

    values: Float[Array, ...] | Any
    """The matrix, of any number of dimensions."""
    largest: Float[Array, "*G k"] | Any
    """Any float32; its gradient is the measurement, per matrix of a stack."""
    statistic: Statistic = dataclasses.field(default="largest", metadata={"static": True})
    """What is measured."""

    def multiply(
        self, product: Callable[[Array, Array], Array], x: Float[Array, ...]
    ) -> Float[Array, ...]:
        """Return a product, and measure the activations."""
        y = product(jax.lax.stop_gradient(x), self.values.astype(x.dtype))
        rows = x.reshape(-1, self.largest.shape[-1])
        ids = jnp.zeros(rows.shape[:1], jnp.int32)
        return _measure(self.statistic, y, rows, self.largest, ids)

    def multiply_groups(
        self,
        rows: Float[Array, "R k"],
        group_sizes: Int[Array, " G"],
        *,
        implementation: Implementation | None,
    ) -> Float[Array, "R n"]:
        """Return rows times the matrix of their group, and measure the rows of each group.

        Rows past the last group are not measured.
        """
        groups, length = self.largest.shape
        matrices = self.values.reshape(groups, length, -1).astype(rows.dtype)
        still = jax.lax.stop_gradient(rows)
        product = grouped_matmul(still, matrices, group_sizes, implementation=implementation)
        ends = jnp.cumsum(group_sizes.astype(jnp.int32))
        ids = jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right")
        return _measure(self.statistic, product, rows, self.largest, ids)

    def logical_axes(self, axes: Axes) -> ObservedArray:
        """Return the logical axes of the matrix and of what is measured."""
        largest = (*axes[: self.largest.ndim - 1], None)
        return dataclasses.replace(self, values=axes, largest=largest)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _measure(
    statistic: Statistic, product: Array, rows: Array, largest: Array, ids: Array
) -> Array:
    """Return the product; the gradient of `largest` is that of each row's matrix."""
    del statistic, rows, largest, ids
    return product


def _forward(
    statistic: Statistic, product: Array, rows: Array, largest: Array, ids: Array
) -> tuple[Array, Any]:
    num_groups = largest.shape[0] if largest.ndim > 1 else 1
    sizes = jnp.abs(rows).astype(jnp.float32)
    if statistic == "squares":
        measured = jax.ops.segment_sum(jnp.square(sizes), ids, num_segments=num_groups)
    else:
        measured = jax.ops.segment_max(sizes, ids, num_segments=num_groups)
    values = jnp.maximum(measured, 0.0).reshape(largest.shape)  # maxima of no rows are -inf
    return product, (rows, values)


def _backward(
    statistic: Statistic, residuals: tuple[Array, Array], gradient: Array
) -> tuple[Any, ...]:
    """Return zeros for the rows, so that earlier products are reached as well."""
    del statistic, gradient
    rows, values = residuals
    return None, jnp.zeros_like(rows), values, None


_measure.defvjp(_forward, _backward)
