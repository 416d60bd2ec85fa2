# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures means of the inputs and of the output gradients of a product: `ProbedArray`.

    inputs[0]   gets the sum of x over tokens as its gradient, inputs[1] the number of tokens
    outputs[0]  gets the sum of dL/dy over tokens, outputs[1] the number of tokens

A matrix with probes multiplies as the matrix alone, and its gradient is that of the matrix: both
probes are arguments of identities with their own gradient. Autodiff adds the sums over layers'
devices and micro-batches. Where devices hold copies of the same tokens both a sum and its count are
multiples, and the mean stays.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Implementation
from pallas_kernels.jax_versions import match_varying
from sharding.products.wrapped import Axes, WrappedMatrix


# Not type-checked: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProbedArray(WrappedMatrix):
    """Floating matrix whose inputs and output gradients are measured."""

    values: Float[Array, ...] | Any
    """The matrix; the dimensions that are summed over come first."""
    inputs: Float[Array, "2 ..."] | Any
    """Zeros, 2 and the dimensions that are summed over."""
    outputs: Float[Array, "2 ..."] | Any
    """Zeros, 2 and the other dimensions."""

    def multiply(
        self, product: Callable[[Array, Array], Array], x: Float[Array, ...]
    ) -> Float[Array, ...]:
        """Return a product, and measure its operands in the backward pass."""
        x = _observe_values(x, match_varying(self.inputs, x))
        y = product(x, self.values.astype(x.dtype))
        return _observe_gradient(y, match_varying(self.outputs, y))

    def multiply_groups(
        self,
        rows: Float[Array, "R k"],
        group_sizes: Int[Array, " G"],
        *,
        implementation: Implementation | None,
    ) -> Float[Array, "R n"]:
        """Refuse a stack of experts, which has no probes."""
        raise AssertionError("experts have no probes")

    def logical_axes(self, axes: Axes) -> ProbedArray:
        """Return the logical axes of the matrix and its probes."""
        first = axes[: self.inputs.ndim - 1]
        last = axes[self.inputs.ndim - 1 :]
        return ProbedArray(values=axes, inputs=(None, *first), outputs=(None, *last))


def means(probe: Float[Array, "*L 2 n"]) -> Float[Array, "*L n"]:
    """Return the means over tokens from the gradient of a probe with one dimension.

    Args:
        probe: Sums and counts.
    """
    return probe[..., 0, :] / jnp.maximum(probe[..., 1, :], 1.0)


def _sums(values: Array, probe: Array) -> Array:
    """Return the sums over the leading dimensions and their number, in the shape of a probe."""
    leading = tuple(range(values.ndim - probe.ndim + 1))
    total = jnp.sum(values, axis=leading, dtype=probe.dtype)
    number = values.size // total.size
    return jnp.stack([total, jnp.full_like(total, number)])


@jax.custom_vjp
def _observe_values(x: Array, probe: Array) -> Array:
    """Return x; the gradient of the probe is the sum of x over tokens, and their number."""
    del probe
    return x


@jax.custom_vjp
def _observe_gradient(y: Array, probe: Array) -> Array:
    """Return y; the gradient of the probe is that of y summed over tokens, and their number."""
    del probe
    return y


_observe_values.defvjp(
    lambda x, probe: (x, (x, probe)), lambda kept, gradient: (gradient, _sums(*kept))
)
_observe_gradient.defvjp(
    lambda y, probe: (y, probe), lambda probe, gradient: (gradient, _sums(gradient, probe))
)
