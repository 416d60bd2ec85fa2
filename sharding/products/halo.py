# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Products in 8 bits with a sharded weight, gathered encoded or in its own dtype.

A fully sharded weight is gathered inside a region (`sharding/constrain.py`), once per use:

    codes    rotated and rounded on the devices of its pieces; 1 byte per value travels
    weight   gathered in its own dtype, then rotated and rounded by every device

The gradient returns in the dtype of the weight either way. Weights gathered outside of regions
(`zero2` all once a step, `hierarchical` those of other replicas) travel in their own dtype.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
from jaxtyping import Array

from pallas_kernels.backend import Implementation
from pallas_kernels.halo import EncodedWeight, Halo, encode, project, project_groups
from sharding.constrain import MeshAxes

Gathered = Literal["codes", "weight"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HaloProduct:
    """Products of a layer in 8 bits."""

    halo: Halo
    """Dtype, rotations and blocks."""
    gathered: Gathered = "codes"
    """codes or weight: gathered form of a weight that is split further than its product."""
    dense: Implementation | None = None
    """Implementation of `quantized_matmul`."""
    grouped: Implementation | None = None
    """Implementation of `grouped_matmul`."""

    def encode(
        self,
        weight: Array,
        gathered: MeshAxes,
        cut: MeshAxes,
        *,
        contracted: int = 1,
        is_stack: bool = False,
    ) -> EncodedWeight:
        """Return the whole weight, encoded, from a device's piece; see `constrain.Encoded`.

        Args:
            weight: Piece of this device.
            gathered: Mesh axes per dimension along which it is gathered; (): none.
            cut: Mesh axes per dimension that split it; (): none.
            contracted: Number of dimensions that a product sums over.
            is_stack: Whether the first dimension counts matrices.
        """
        if self.gathered == "weight" and gathered:
            for dimension, names in enumerate(gathered):
                if names:
                    weight = jax.lax.all_gather(weight, names, axis=dimension, tiled=True)
            cut = tuple(
                tuple(axis for axis in axes if axis not in names)
                for axes, names in zip(cut, gathered, strict=True)
            )
            gathered = ()
        return encode(
            weight,
            self.halo,
            contracted=contracted,
            is_stack=is_stack,
            gathered=gathered,
            over=tuple(axis for axes in cut[is_stack:] for axis in axes),
        )

    def project(self, x: Array, weight: EncodedWeight, dtype: Any) -> Array:
        """Return a dense product; see `pallas_kernels.halo.project`.

        Args:
            x: Activations.
            weight: Result of `encode`.
            dtype: Dtype of the result; None: that of x.
        """
        return project(x, weight, self.halo, dtype=dtype, implementation=self.dense)

    def project_groups(self, rows: Array, weights: EncodedWeight, group_sizes: Array) -> Array:
        """Return a product of rows sorted by group; see `pallas_kernels.halo.project_groups`.

        Args:
            rows: Activations.
            weights: Result of `encode`, a stack.
            group_sizes: Rows of each group.
        """
        return project_groups(rows, weights, group_sizes, self.halo, implementation=self.grouped)
