# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Config of the experts without computation: how many of each kind a router may choose.

Their ids follow those of the E experts that compute: zero, copy, constant.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ZeroComputationConfig:
    """Experts that cost nothing: they return 0, their input, or mix in a trained vector.

    Source: MoE++ (arXiv 2410.07348, section 3.1).
    """

    name: ClassVar[str] = "zero_computation"

    num_zero: int = 1
    """Number of experts that return 0."""
    num_copy: int = 1
    """Number of experts that return their input."""
    num_constant: int = 2
    """Number of experts that return a mixture of their input and a trained vector."""

    def __post_init__(self):
        for field in ("num_zero", "num_copy", "num_constant"):
            if getattr(self, field) < 0:
                raise ValueError(
                    f"zero_computation.{field}={getattr(self, field)} must be 0 or more"
                )
        if not self.total:
            raise ValueError(
                "zero_computation without any expert: set it to None, or one of num_zero, num_copy"
                " and num_constant above 0"
            )

    @property
    def total(self) -> int:
        """Number of experts without computation."""
        return self.num_zero + self.num_copy + self.num_constant
