# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mixes tokens into the rows that experts read, and their outputs back into tokens (Soft MoE)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing import Slots


def read_slots(tokens: Float[Array, "T D"], slots: Slots) -> Float[Array, "R D"]:
    """Return the mixtures of tokens that the experts read, sequence by sequence.

    Args:
        tokens: Activations of whole sequences.
        slots: Weights of the mixtures.
    """
    groups, length, number = slots.dispatch.shape
    x = tokens.astype(jnp.float32).reshape(groups, length, -1)
    mixed = jnp.einsum("gsp,gsd->gpd", slots.dispatch, x, preferred_element_type=jnp.float32)
    return mixed.reshape(groups * number, -1).astype(tokens.dtype)  # G*P, D


def write_slots(rows: Float[Array, "R D"], slots: Slots) -> Float[Array, "T D"]:
    """Return the mixtures of the experts' outputs that the tokens receive.

    Args:
        rows: Outputs of the experts.
        slots: Weights of the mixtures.
    """
    groups, length, number = slots.combine.shape
    y = rows.astype(jnp.float32).reshape(groups, number, -1)
    mixed = jnp.einsum("gsp,gpd->gsd", slots.combine, y, preferred_element_type=jnp.float32)
    return mixed.reshape(groups * length, -1).astype(rows.dtype)  # T, D
