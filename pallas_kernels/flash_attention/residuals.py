# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Names, for `jax.checkpoint`, what flash_attention keeps for its backward pass: its results."""

from __future__ import annotations

from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.array_types import Array

ATTENDED = "flash_attention_out"
"""Output and log-sum-exp of the queries."""


def name_results(out: Array, lse: Array) -> tuple[Array, Array]:
    """Return the results of the forward pass with their name.

    Args:
        out: Output.
        lse: Log-sum-exp.
    """
    return checkpoint_name(out, ATTENDED), checkpoint_name(lse, ATTENDED)
