# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Uniform random routing: K distinct experts for each token, drawn again at every step.

A control for learned routers. In evaluation the numbers depend on the seed and on the token's
number in the batch: the same batch gives the same result, and the same text in other rows, or
decoded, gives another.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.routing.base import Key, RouterInputs, Traits
from jaxmoe.routing.routers.noise import token_noise
from jaxmoe.routing.routers.unlearned.unlearned import UnlearnedBase


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UniformRandomConfig(UnlearnedBase):
    """K random experts for each token."""

    name: ClassVar[str] = "uniform_random"

    seed: int = 0
    """Seed of the numbers in evaluation; in training they come from the key of the step."""

    @property
    def traits(self) -> Traits:
        """Causal; draws random numbers; nothing is learned."""
        return Traits(is_pointwise=False, is_rowwise=False, needs_key=True, is_learned=False)

    def choose(
        self, inputs: RouterInputs, *, num_experts: int, top_k: int, train: bool, key: Key
    ) -> Int[Array, "T K"]:
        """Return the K largest of E uniform numbers."""
        key = key if train else jax.random.key(self.seed)
        return jax.lax.top_k(token_noise(key, inputs, num_experts, "uniform"), top_k)[1]

    def probabilities(
        self, expert_ids: Int[Array, "T K"], *, num_experts: int
    ) -> Float[Array, "T E"]:
        """Return 1/E."""
        return jnp.full((expert_ids.shape[0], num_experts), 1.0 / num_experts, jnp.float32)
