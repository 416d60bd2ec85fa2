# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which dtype holds what. Casts happen at a room's door, never in the middle of its arithmetic.

Router logits, softmaxes, norms, losses, optimiser state and reductions are always float32 and are
not a choice.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

DtypeName = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPolicy:
    """Dtypes of stored parameters and of matrix products."""

    parameters: DtypeName = "float32"
    """Stored parameters; the optimiser's moments are float32."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Operands of matrix products; auto: bfloat16 on accelerators, float32 on the CPU."""

    @property
    def parameter_dtype(self) -> Any:
        """The dtype of stored parameters."""
        return jnp.dtype(self.parameters)

    @property
    def compute_dtype(self) -> Any:
        """The dtype of matrix products; asks JAX for its backend when "auto"."""
        if self.compute == "auto":
            return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
        return jnp.dtype(self.compute)
