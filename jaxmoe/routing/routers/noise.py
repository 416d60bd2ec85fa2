# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Random numbers of a token: the same on every mesh, however the batch is divided.

Each token has its own key, folded from the layer's key and the token's number in the batch
(`RouterInputs.context["index"]`), so that each device draws what a single device would draw.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.routing.base import Key, RouterInputs


def require_key(key: Key) -> Array:
    """Return the key.

    Raises:
        ValueError: `key` is None.
    """
    if key is None:
        raise ValueError("this router draws random numbers in training: give `key`")
    return key


def token_index(inputs: RouterInputs) -> Int[Array, " T"]:
    """Return the number of each token in the batch; its position in `inputs` if not given."""
    index = inputs.context.get("index")
    return jnp.arange(inputs.x.shape[0], dtype=jnp.int32) if index is None else index


def token_noise(
    key: Key, inputs: RouterInputs, width: int, law: Literal["normal", "uniform"]
) -> Float[Array, "T width"]:
    """Draw `width` independent f32 numbers for each token.

    Args:
        key: Key of this layer and step.
        inputs: Tokens; `context["index"]` numbers them.
        width: Numbers per token.
        law: Standard normal, or uniform in [0, 1).

    Raises:
        ValueError: `key` is None.
    """
    key = require_key(key)
    index = token_index(inputs)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, index)
    draw = jax.random.normal if law == "normal" else jax.random.uniform
    return jax.vmap(lambda token_key: draw(token_key, (width,), jnp.float32))(keys)
