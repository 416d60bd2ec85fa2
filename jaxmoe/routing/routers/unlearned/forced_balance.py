# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Forced balance: experts in turn, whatever the tokens are.

    experts of token i:  i K, i K + 1, ..., i K + K - 1   modulo E

where i is its number in the batch. Over E consecutive tokens every expert has exactly K. For
benchmarks: the time of a step without the luck of its routing. Decoding numbers its tokens anew at
every pass, and so gives them other experts than the whole text would.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.routing.base import RouterInputs, Traits
from jaxmoe.routing.routers.unlearned.unlearned import Unlearned, shares_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForcedBalanceConfig:
    """K experts in turn: an exactly even load, for benchmarks."""

    name: ClassVar[str] = "forced_balance"

    @property
    def traits(self) -> Traits:
        """Nothing is learned."""
        return Traits(is_learned=False)

    def build(self, *, num_experts: int, top_k: int, embed_dim: int) -> Unlearned:
        """The router for these sizes."""
        del embed_dim
        return Unlearned(self, num_experts, top_k)

    def choose(
        self,
        inputs: RouterInputs,
        *,
        num_experts: int,
        top_k: int,
        train: bool,
        key: Array | None,
    ) -> Int[Array, "T K"]:
        """The next K experts."""
        del train, key
        index = inputs.context.get("index")
        if index is None:
            index = jnp.arange(inputs.x.shape[0], dtype=jnp.int32)
        # The first remainder keeps the product small.
        first = index % num_experts * top_k
        return (first[:, None] + jnp.arange(top_k, dtype=jnp.int32)[None, :]) % num_experts

    def probabilities(
        self, expert_ids: Int[Array, "T K"], *, num_experts: int
    ) -> Float[Array, "T E"]:
        """1/K for the experts of the token."""
        return shares_of(expert_ids, num_experts)
