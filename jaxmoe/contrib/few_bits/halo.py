# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Matrix products of layers in 8 bits, forward and backward (`pallas_kernels/halo`).

A fully sharded weight is gathered inside a region (`sharding/constrain.py`), once per use:

    codes    rotated and rounded on the devices of its pieces; 1 byte per value travels
    weight   gathered in its own dtype, then rotated and rounded by every device

The gradient returns in the dtype of the weight either way. Weights gathered outside of regions
(`zero2` all once a step, `hierarchical` those of other replicas) travel in their own dtype.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
from jaxtyping import Array

from jaxmoe.precision import MatmulConfig
from pallas_kernels.halo import EncodedWeight, Halo, encode, project, project_groups
from sharding.constrain import MeshAxes
from sharding.products.encoded import EncodedProduct

Gathered = Literal["codes", "weight"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HaloConfig(MatmulConfig):
    """Products in 8 bits, rotated first (HALO, arXiv 2501.02625)."""

    name: ClassVar[str] = "halo"
    kernels: ClassVar[tuple[str, ...]] = ("quantized_matmul", "grouped_matmul")

    dtype: Literal["int8", "float8_e4m3fn"] = "int8"
    """Dtype of both factors, forward and backward."""
    level: Literal[0, 1, 2] = 2
    """Rotations: 0 for none, 1 along features, 2 for gradients also over tokens. int8 needs 2,
    float8 1 or 0."""
    block: int | None = 128
    """Maximum of features or tokens rotated together; None for all on a device."""
    gathered: Gathered = "codes"
    """Data gathered of a fully sharded weight: its codes in 8 bits, or the weight itself."""

    def __post_init__(self):
        if self.block is not None and self.block < 2:
            raise ValueError(
                f"precision.matmul.block={self.block} must be at least 2, or None for all; without"
                " rotations set precision.matmul.level to 0"
            )

    def build(self) -> HaloProduct:
        """Return the product that layers use."""
        halo = Halo(dtype=self.dtype, level=self.level, block=self.block)
        return HaloProduct(halo=halo, gathered=self.gathered)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HaloProduct(EncodedProduct):
    """Products of a layer in 8 bits."""

    halo: Halo
    """Dtype, rotations and blocks."""
    gathered: Gathered = "codes"
    """codes or weight: gathered form of a weight that is split further than its product."""

    def encode(
        self,
        weight: Array,
        gathered: MeshAxes,
        cut: MeshAxes,
        *,
        contracted: int = 1,
        is_stack: bool = False,
    ) -> EncodedWeight:
        """Return the whole weight, encoded; see the base class."""
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
        """Return a dense product; see `pallas_kernels.halo.project`."""
        return project(x, weight, self.halo, dtype=dtype, implementation=self.dense)

    def project_groups(self, rows: Array, weights: EncodedWeight, group_sizes: Array) -> Array:
        """Return a product of rows by group; see `pallas_kernels.halo.project_groups`."""
        return project_groups(rows, weights, group_sizes, self.halo, implementation=self.grouped)
