# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Random numbers of a token: the same on every mesh, however the batch is cut.

Each token has a key of its own, folded from the layer's key and the token's number in the batch
(`RouterInputs.context["index"]`), so that a device draws for its tokens what one device would.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.base import RouterInputs


def token_noise(
    key: Array | None, inputs: RouterInputs, width: int, law: Literal["normal", "uniform"]
) -> Float[Array, "T width"]:
    """`width` independent numbers for each token, f32: standard normal, or uniform in [0, 1).

    Args:
        key: of this layer and step.
        inputs: with `context["index"]`; tokens are numbered as they come where it is missing.
        width: numbers per token.
        law: of each number.

    Raises:
        ValueError: `key` is None.
    """
    if key is None:
        raise ValueError("this router draws random numbers in training: give `key`")
    index = inputs.context.get("index")
    if index is None:
        index = jnp.arange(inputs.x.shape[0], dtype=jnp.int32)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, index)
    draw = jax.random.normal if law == "normal" else jax.random.uniform
    return jax.vmap(lambda token_key: draw(token_key, (width,), jnp.float32))(keys)
