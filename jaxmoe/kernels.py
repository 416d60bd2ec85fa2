# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Names the implementation of each kernel that a model uses; `pallas_kernels` has them."""

from __future__ import annotations

import dataclasses

from pallas_kernels import OPERATIONS
from pallas_kernels.backend import Implementation


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelsConfig:
    """Implementation of each kernel; None picks one that can run and logs which."""

    attention: Implementation | None = None
    """Implementation of `pallas_kernels.flash_attention`."""
    grouped_swiglu: Implementation | None = None
    """Implementation of `pallas_kernels.grouped_swiglu`, the experts."""
    quantized_matmul: Implementation | None = None
    """Implementation of `pallas_kernels.quantized_matmul`, dense products in few bits."""
    grouped_matmul: Implementation | None = None
    """Implementation of `pallas_kernels.grouped_matmul`, the experts in few bits."""
    state_space_dual: Implementation | None = None
    """Implementation of `pallas_kernels.state_space_dual`, the states of Mamba-2."""
    selective_scan: Implementation | None = None
    """Implementation of `pallas_kernels.selective_scan`, the states of Mamba."""

    @property
    def by_operation(self) -> dict[str, Implementation | None]:
        """The same by the name of the operation."""
        return {
            "flash_attention": self.attention,
            "grouped_swiglu": self.grouped_swiglu,
            "quantized_matmul": self.quantized_matmul,
            "grouped_matmul": self.grouped_matmul,
            "state_space_dual": self.state_space_dual,
            "selective_scan": self.selective_scan,
        }

    def check_runs(self) -> None:
        """Refuse an implementation that cannot run on the devices of the mesh in context.

        Raises:
            ValueError: Names the field.
        """
        for name, asked in self.by_operation.items():
            if asked is None:
                continue
            try:
                OPERATIONS[name].choose(asked)
            except ValueError as error:
                field = "attention" if name == "flash_attention" else name
                raise ValueError(f"execution.kernels.{field}={asked}: {error}") from error
