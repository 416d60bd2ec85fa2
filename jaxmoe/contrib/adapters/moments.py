# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sets moments of an optimiser to zero, for adapters that replace parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool


def without_moments(
    opt_state: Any, params: Mapping[str, Array], masks: Mapping[str, Bool[Array, ...]]
) -> Any:
    """Return the state of an optimiser with zeros for some entries of some parameters.

    Leaves whose path ends with that of a parameter, and which have its shape, are its moments.

    Args:
        opt_state: State of an optax transformation.
        params: Parameters by path.
        masks: Entries to set to zero by path of the parameter, of as many dimensions as it has.
    """

    def kept(keys: Any, leaf: Any) -> Any:
        path = "/".join(str(getattr(key, "key", "")) for key in keys)
        name = next((name for name in masks if path.endswith(f"/{name}")), None)
        if name is None or leaf.shape != params[name].shape:
            return leaf
        return jnp.where(masks[name], jnp.zeros_like(leaf), leaf)

    return jax.tree_util.tree_map_with_path(kept, opt_state)
