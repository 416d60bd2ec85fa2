# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn routing: in training the choice is made on an even transport plan.

    plan       = Sinkhorn of exp(z), no gradient; rows sum to 1, columns to n/E  (`transport.py`)
    training   the K experts of largest plan_ti;   evaluation   the K of largest z_ti
    score_ti   = sigmoid(z_ti) if K = 1, else softmax_E(z_t)_i

The plan's columns are even, the chosen K are only nearly so. The weights see the logits alone, and
the gradient comes through them. A balance loss is refused: the plan already does its work.
Megatron-LM iterates until the columns' scalings move by less than 1e-4, over the tokens of one
device; here the count is fixed and the tokens are those of `scope`.

Sources: arXiv 2202.01169 (S-BASE), and Megatron-LM's load balancing "sinkhorn", whose weights
these are.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array

from jaxmoe.parameters import Declaration
from jaxmoe.routing.base import RouterInputs, Traits
from jaxmoe.routing.routers.assignment.transport import check_iterations, scalings
from jaxmoe.routing.routers.token_choice.token_choice import (
    Scored,
    TokenChoice,
    linear_declarations,
    linear_logits,
)
from jaxmoe.routing.scopes import Scope


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SinkhornConfig:
    """The K experts of largest share in an even plan; in evaluation of highest logit."""

    name: ClassVar[str] = "sinkhorn"
    bias: ClassVar[None] = None
    groups: ClassVar[None] = None

    iterations: int = 20
    """Of Sinkhorn's algorithm, in training."""
    scope: Scope = "sequence"
    """Tokens over which the plan is even: of each row of the batch, or of the micro-batch."""

    def __post_init__(self):
        check_iterations(self.iterations)

    @property
    def traits(self) -> Traits:
        """Evens the choice over the tokens of a scope in training."""
        return Traits(sees_others=True, evens_load=True)

    def build(self, *, num_experts: int, top_k: int, embed_dim: int) -> TokenChoice:
        """The router for these sizes."""
        return TokenChoice(self, num_experts, top_k, embed_dim)

    def declarations(self, *, num_experts: int, embed_dim: int) -> dict[str, Declaration]:
        """One matrix."""
        return linear_declarations(num_experts=num_experts, embed_dim=embed_dim)

    def score(
        self,
        params: dict[str, Array],
        inputs: RouterInputs,
        *,
        top_k: int,
        train: bool,
        key: Array | None,
    ) -> Scored:
        """Scores of the logits, preference of the plan."""
        del key
        logits = preference = linear_logits(params, inputs)
        if train:
            preference = logits + scalings(
                logits, inputs, scope=self.scope, iterations=self.iterations
            )
        score = jax.nn.log_sigmoid if top_k == 1 else jax.nn.log_softmax
        return Scored(
            logits=logits,
            log_scores=score(logits),
            probs=jax.nn.softmax(logits, axis=-1),
            preference=preference,
        )
