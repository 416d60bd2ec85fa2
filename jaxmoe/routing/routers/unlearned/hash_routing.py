# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hash routing: a token's experts are a fixed random function of its id in the vocabulary.

    experts(id) = the K largest of E uniform numbers that belong to (seed, id)

The numbers are drawn again at every call instead of kept as a table of V rows, so that the router
knows no vocabulary. All layers have the same table. It is the random hash of the paper; its
balanced one needs the frequencies of the tokens and is not here.

Source: Hash Layers (arXiv 2106.04426, section 3.1).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Float, Int

from jaxmoe.routing.base import RouterInputs, Traits
from jaxmoe.routing.routers.noise import token_noise
from jaxmoe.routing.routers.unlearned.unlearned import Unlearned, shares_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HashConfig:
    """K experts fixed for each token id."""

    name: ClassVar[str] = "hash"

    seed: int = 0
    """Of the table."""

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
        """Those of the token's id.

        Raises:
            ValueError: the ids are not in the context.
        """
        del train, key
        if "tokens" not in inputs.context:
            raise ValueError(
                "the router hash chooses by the ids of the tokens: give them as"
                " RouterInputs.context['tokens'], [T] i32"
            )
        by_id = dataclasses.replace(inputs, context={"index": inputs.context["tokens"]})
        numbers = token_noise(jax.random.key(self.seed), by_id, num_experts, "uniform")
        return jax.lax.top_k(numbers, top_k)[1]

    def probabilities(
        self, expert_ids: Int[Array, "T K"], *, num_experts: int
    ) -> Float[Array, "T E"]:
        """1/K for the experts of the token."""
        return shares_of(expert_ids, num_experts)
