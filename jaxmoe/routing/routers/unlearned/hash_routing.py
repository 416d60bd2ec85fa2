# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hash routing: a token's experts are a fixed random function of its vocabulary id.

    experts(id) = the K largest of E uniform numbers drawn from (seed, id)

The numbers are drawn at every call instead of kept as a table of V rows, so the router does not
depend on V. All layers use the same function. This is the paper's random hash; its balanced hash
needs token frequencies and is not implemented.

Source: Hash Layers (arXiv 2106.04426, section 3.1).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Int

from jaxmoe.routing.base import Key, RouterInputs
from jaxmoe.routing.routers.noise import token_noise
from jaxmoe.routing.routers.unlearned.unlearned import DeterministicBase


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HashConfig(DeterministicBase):
    """K experts fixed for each token id."""

    name: ClassVar[str] = "hash"

    seed: int = 0
    """Seed of the hash function."""

    def choose(
        self, inputs: RouterInputs, *, num_experts: int, top_k: int, train: bool, key: Key
    ) -> Int[Array, "T K"]:
        """Return the K experts of each token's id.

        Raises:
            ValueError: `inputs.context` has no `tokens`.
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
