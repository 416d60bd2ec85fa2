# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Socket `EncodedProduct`: products of layers with a weight that is encoded where it is used.

    encode(weight, gathered, cut, ...)           a device's piece -> the whole weight, encoded
    project(x, weight, dtype)                    a dense product
    project_groups(rows, weights, group_sizes)   rows times the matrix of their group

A choice of `execution.precision.matmul` builds one. Weights stay floating parameters: they enter an
island encoded (`constrain.Encoded`), and products differ forward and backward.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

from jaxtyping import Array

from pallas_kernels.backend import Implementation
from sharding.constrain import MeshAxes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EncodedProduct(abc.ABC):
    """Base class of the members."""

    dense: Implementation | None = None
    """Implementation of `quantized_matmul`."""
    grouped: Implementation | None = None
    """Implementation of `grouped_matmul`."""

    @abc.abstractmethod
    def encode(
        self,
        weight: Array,
        gathered: MeshAxes,
        cut: MeshAxes,
        *,
        contracted: int = 1,
        is_stack: bool = False,
    ) -> Any:
        """Return the whole weight, encoded, from a device's piece; see `constrain.Encoded`.

        Args:
            weight: Piece of this device.
            gathered: Mesh axes per dimension along which it is gathered; (): none.
            cut: Mesh axes per dimension that split it; (): none.
            contracted: Number of dimensions that a product sums over.
            is_stack: Whether the first dimension counts matrices.

        Returns:
            A pytree that is not an array.
        """

    @abc.abstractmethod
    def project(self, x: Array, weight: Any, dtype: Any) -> Array:
        """Return a dense product.

        Args:
            x: Activations.
            weight: Result of `encode`.
            dtype: Dtype of the result; None: that of x.
        """

    @abc.abstractmethod
    def project_groups(self, rows: Array, weights: Any, group_sizes: Array) -> Array:
        """Return a product of rows sorted by group.

        Args:
            rows: Activations.
            weights: Result of `encode`, a stack.
            group_sizes: Rows of each group.
        """
