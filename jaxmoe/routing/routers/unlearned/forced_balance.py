# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Forced balance: experts in turn, independent of the tokens.

    experts of token i:  i K, i K + 1, ..., i K + K - 1   modulo E

where i is the token's number in the batch. Over E consecutive tokens every expert has exactly K.
For benchmarks: the time of a step does not depend on the routing. Decoding numbers the tokens of
every pass from 0, so they get other experts than in a pass over the whole text.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmoe.routing.base import Key, RouterInputs, Traits
from jaxmoe.routing.routers.noise import token_index
from jaxmoe.routing.routers.unlearned.unlearned import DeterministicBase


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForcedBalanceConfig(DeterministicBase):
    """K experts in turn: an exactly even load, for benchmarks."""

    name: ClassVar[str] = "forced_balance"

    @property
    def traits(self) -> Traits:
        """Experts by the token's place in the batch."""
        return Traits(is_pointwise=False, is_rowwise=False, is_learned=False)

    def choose(
        self, inputs: RouterInputs, *, num_experts: int, top_k: int, train: bool, key: Key
    ) -> Int[Array, "T K"]:
        """Return the next K experts."""
        del train, key
        # The first remainder keeps the product from overflowing.
        first = token_index(inputs) % num_experts * top_k
        return (first[:, None] + jnp.arange(top_k, dtype=jnp.int32)[None, :]) % num_experts
