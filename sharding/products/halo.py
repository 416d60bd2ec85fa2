# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Products in few bits whose weight is cut over the mesh: what travels, and whose scale it is.

A fully sharded weight is gathered inside an island (`sharding/constrain.py`), once per use:

    codes    rotated and rounded where its pieces are; 1 byte per value travels
    weight   gathered in its own dtype, then rotated and rounded by every device

The gradient comes back in the dtype of the weight either way. What other layouts gather outside
(`zero2` all of them once a step, `hierarchical` those of other replicas) travels as it is stored.
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
    """How a layer multiplies in few bits."""

    halo: Halo
    """The arithmetic."""
    gathered: Gathered = "codes"
    """What is gathered of a weight that is cut further than its product."""
    dense: Implementation | None = None
    """Of `quantized_matmul`."""
    grouped: Implementation | None = None
    """Of `grouped_matmul`."""

    def encode(
        self,
        weight: Array,
        gathered: MeshAxes,
        cut: MeshAxes,
        *,
        contracted: int = 1,
        is_stack: bool = False,
    ) -> EncodedWeight:
        """A device's piece of a weight as the whole, in few bits: see `constrain.Encoded`.

        Args:
            weight: the piece.
            gathered: of each dimension the mesh axes along which it is gathered; (): nothing is.
            cut: of each the mesh axes over which it is cut; (): nothing is.
            contracted: dimensions that a product sums over.
            is_stack: the first dimension counts matrices.
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
        """A dense product: see `pallas_kernels.halo.project`.

        Args:
            x: activations.
            weight: of `encode`.
            dtype: of the result; that of x when None.
        """
        return project(x, weight, self.halo, dtype=dtype, implementation=self.dense)

    def project_groups(self, rows: Array, weights: EncodedWeight, group_sizes: Array) -> Array:
        """A product of rows sorted by group: see `pallas_kernels.halo.project_groups`.

        Args:
            rows: activations.
            weights: of `encode`, a stack.
            group_sizes: rows of each group.
        """
        return project_groups(rows, weights, group_sizes, self.halo, implementation=self.grouped)
