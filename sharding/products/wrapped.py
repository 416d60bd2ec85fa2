# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Socket `WrappedMatrix`: a floating matrix that a layer multiplies in a way of its own.

    multiply(product, x)                 a dense product
    multiply_groups(rows, sizes, ...)    rows times the matrix of their group
    logical_axes(axes)                   layout of all its parts

A member is a pytree in place of a parameter, put there by a `View` or before the forward pass: it
measures operands, or computes with them otherwise. Layers, regions and scans treat it as the
matrix.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Implementation

Axes = tuple[str | None, ...]


class WrappedMatrix(abc.ABC):
    """Base class of the members, which are dataclasses."""

    __slots__ = ()

    values: Float[Array, ...] | Any
    """The matrix; the dimensions that are summed over come first."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the matrix."""
        return self.values.ndim

    @abc.abstractmethod
    def multiply(
        self, product: Callable[[Array, Array], Array], x: Float[Array, ...]
    ) -> Float[Array, ...]:
        """Return a product with the matrix, on one device.

        Args:
            product: (activations, matrix in their dtype) -> product. What is summed over is last in
                the activations and first in the matrix.
            x: Activations.
        """

    @abc.abstractmethod
    def multiply_groups(
        self,
        rows: Float[Array, "R k"],
        group_sizes: Int[Array, " G"],
        *,
        implementation: Implementation | None,
    ) -> Float[Array, "R n"]:
        """Return rows times the matrix of their group.

        Args:
            rows: Rows sorted by group.
            group_sizes: Number of rows of each group.
            implementation: Implementation of `grouped_matmul`.
        """

    @abc.abstractmethod
    def logical_axes(self, axes: Axes) -> Any:
        """Return the record with the logical axes of each part in its place.

        Args:
            axes: Logical axes of the matrix.
        """
