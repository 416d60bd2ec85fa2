# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routers without parameters: the config names the experts, each with the gate 1/K.

    score_ti = 1/K for the chosen,   logits 0,   z-loss constant

Controls for experiments and benchmarks. Balance losses have no effect on them.

To add a member: a config in `jaxmoe/routing/routers/unlearned/` that extends `DeterministicBase`
and defines `name` and `choose`, or `UnlearnedBase` and `probabilities` too; then the steps in
`jaxmoe/routing/__init__.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.declarations import Declaration
from jaxmoe.routing.base import (
    Arrays,
    Key,
    RouterBase,
    RouterInputs,
    RouterOutput,
    Traits,
    chosen_experts,
)
from jaxmoe.routing.routers.linear import SizedRouter, token_output


class UnlearnedBase(RouterBase):
    """Base class of the family's configs."""

    __slots__ = ()

    @property
    def traits(self) -> Traits:
        """Causal; nothing is learned."""
        return Traits(is_learned=False)

    @abc.abstractmethod
    def choose(
        self, inputs: RouterInputs, *, num_experts: int, top_k: int, train: bool, key: Key
    ) -> Int[Array, "T K"]:
        """Return K distinct experts for each token."""

    @abc.abstractmethod
    def probabilities(
        self, expert_ids: Int[Array, "T K"], *, num_experts: int
    ) -> Float[Array, "T E"]:
        """Return the probability of each expert; each row sums to 1."""


class DeterministicBase(UnlearnedBase):
    """Base class of the members that draw no random numbers."""

    __slots__ = ()

    def probabilities(
        self, expert_ids: Int[Array, "T K"], *, num_experts: int
    ) -> Float[Array, "T E"]:
        """Return 1/K for the chosen experts."""
        return chosen_experts(expert_ids, num_experts).astype(jnp.float32) / expert_ids.shape[1]


@dataclasses.dataclass(frozen=True)
class Unlearned(SizedRouter):
    """The router."""

    def declarations(self) -> dict[str, Declaration]:
        """Return no parameters."""
        return {}

    def route(
        self, params: Arrays, state: Any, inputs: RouterInputs, *, train: bool, key: Key
    ) -> RouterOutput:
        """Return the experts that the config names."""
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


UnlearnedBase.router = Unlearned
