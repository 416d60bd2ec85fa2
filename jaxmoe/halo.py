# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Matrix products of layers in 8 bits, forward and backward (`pallas_kernels/halo`)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from jaxmoe.precision import MatmulConfig
from pallas_kernels.halo import Halo
from sharding.products.halo import Gathered, HaloProduct


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
