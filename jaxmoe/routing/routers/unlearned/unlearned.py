# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routers without parameters: the experts are given, every one with the gate 1/K.

    score_ti = 1/K for the chosen,   logits 0,   z-loss constant

Controls for experiments and benchmarks. A family: its members are configs that name the experts of
each token (`Chooser`); their files are `hash_routing`, `uniform_random` and `forced_balance`.
Balance losses have no effect on them.

To add a member: a config with the methods of `Chooser`, whose `build` returns
`Unlearned(self, ...)`, then as in `jaxmoe/routing/__init__.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.parameters import Declaration
from jaxmoe.routing.base import RouterInputs, RouterOutput, RouterStatistics, chosen_experts
from jaxmoe.routing.routers.token_choice.token_choice import check_sizes, token_output


class Chooser(Protocol):
    """A config of the family."""

    def choose(
        self,
        inputs: RouterInputs,
        *,
        num_experts: int,
        top_k: int,
        train: bool,
        key: Array | None,
    ) -> Int[Array, "T K"]:
        """K distinct experts for each token."""
        ...

    def probabilities(
        self, expert_ids: Int[Array, "T K"], *, num_experts: int
    ) -> Float[Array, "T E"]:
        """Of each expert, before the dice are cast; sums to 1."""
        ...


@dataclasses.dataclass(frozen=True)
class Unlearned:
    """A chooser with its sizes: the router."""

    config: Any
    num_experts: int
    top_k: int

    def __post_init__(self):
        check_sizes(num_experts=self.num_experts, top_k=self.top_k)

    def declarations(self) -> dict[str, Declaration]:
        """None."""
        return {}

    def init(self, key: Array) -> tuple[dict[str, Array], Any]:
        """No parameters and no state."""
        del key
        return {}, {}

    def route(
        self,
        params: dict[str, Array],
        state: Any,
        inputs: RouterInputs,
        *,
        train: bool,
        key: Array | None,
    ) -> RouterOutput:
        """The experts that the config names."""
        del params, state
        sizes = {"num_experts": self.num_experts, "top_k": self.top_k}
        expert_ids = self.config.choose(inputs, train=train, key=key, **sizes)
        return token_output(
            expert_ids,
            jnp.full(expert_ids.shape, -math.log(self.top_k), jnp.float32),
            inputs,
            logits=jnp.zeros((expert_ids.shape[0], self.num_experts), jnp.float32),
            probs=self.config.probabilities(expert_ids, num_experts=self.num_experts),
        )

    def update(self, state: Any, statistics: RouterStatistics, step: Array) -> Any:
        """Nothing is kept."""
        del statistics, step
        return state


def shares_of(expert_ids: Int[Array, "T K"], num_experts: int) -> Float[Array, "T E"]:
    """1/K for the chosen, 0 for the others: the probabilities of a choice without dice."""
    return chosen_experts(expert_ids, num_experts).astype(jnp.float32) / expert_ids.shape[1]
