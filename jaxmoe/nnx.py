# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The Mixture-of-Experts layer of `jaxmoe.parts` as a module of Flax NNX.

moe = jaxmoe.nnx.MoE(64, num_experts=8, top_k=2, rngs=nnx.Rngs(0))
y, aux = moe(x)
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx import bridge
from jaxtyping import Array, Float

from jaxmoe import parts
from sharding.constrain import without_mesh


class NNXMoE(bridge.ToNNX):
    """A Mixture-of-Experts feed-forward layer of SwiGLU experts.

    The parameters are `nnx.Param`. A router that draws random numbers takes them from the stream
    `router` of `rngs`, and the state of a router is updated by a call with `train=True`.

    Args:
        in_features: D, width of the activations.
        rngs: Random numbers of the initial values.
        **options: Attributes of `jaxmoe.MoE`: num_experts, top_k, router and the others.
    """

    def __init__(self, in_features: int, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(parts.MoE(**options), rngs=rngs)
        x = jnp.zeros((1, 1, in_features), jnp.float32)
        with without_mesh():
            bridge.lazy_init(self, x, tokens=jnp.zeros((1, 1), jnp.int32))

    def __call__(
        self,
        x: Float[Array, "*B D"],
        *,
        train: bool = False,
        mutable: Any = None,
        **options: Any,
    ) -> Any:
        """Route, compute and combine: `jaxmoe.MoE.__call__`.

        Args:
            x: Normed activations.
            train: Whether the router behaves as in training.
            mutable: Collections that the call updates; the state of the router in training when
                None.
            **options: Further arguments of `jaxmoe.MoE`, and `rngs` in place of those of the
                module.

        Returns:
            The output, and `jaxmoe.parts.MoEAux`.
        """
        if mutable is None and train:
            mutable = [parts.STATE]
        return super().__call__(x, train=train, mutable=mutable, **options)


MoE = NNXMoE
