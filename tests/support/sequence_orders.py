# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Inverts the orders of `sequence_order`."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.array_types import Array, Int


def inverse_order(
    order: Int[Array, "*B S"] | Int[np.ndarray, "*B S"],
) -> Int[Array, "*B S"] | Int[np.ndarray, "*B S"]:
    """Return the order that undoes another one."""
    if isinstance(order, np.ndarray):
        return np.argsort(order, axis=-1).astype(np.int32)
    return jnp.argsort(order, axis=-1)
