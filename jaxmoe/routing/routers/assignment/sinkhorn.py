# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn routing: in training experts are chosen by an even transport plan.

    plan       = Sinkhorn of exp(z), no gradient; rows sum to 1, columns to n/E  (`transport.py`)
    training   the K experts of largest plan_ti;   evaluation   the K of largest z_ti
    score_ti   = sigmoid(z_ti) if K = 1, else softmax_E(z_t)_i

The plan's columns are even; the loads of the chosen K are approximately even. The scores, and
through them the gradient, depend on the logits alone. Balance losses are refused, since the plan
replaces them. Megatron-LM iterates until the columns' scalings change by less than 1e-4, over the
tokens of one device; here the number of iterations is fixed and the tokens are those of `scope`.

Sources: arXiv 2202.01169 (S-BASE); the scores are those of Megatron-LM's load balancing "sinkhorn".
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from jaxmoe.routing.base import Arrays, Key, RouterInputs, Traits
from jaxmoe.routing.routers.assignment.transport import check_iterations, scalings
from jaxmoe.routing.routers.linear import linear_logits
from jaxmoe.routing.routers.token_choice.token_choice import Scored, TokenChoiceBase
from jaxmoe.routing.scopes import Scope


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SinkhornConfig(TokenChoiceBase):
    """The K experts of largest share in an even transport plan; in evaluation, of highest logit."""

    name: ClassVar[str] = "sinkhorn"

    iterations: int = 20
    """Iterations of Sinkhorn's algorithm in training."""
    scope: Scope = "sequence"
    """Tokens over which the plan is even: each row of the batch, or the micro-batch."""

    def __post_init__(self):
        check_iterations(self.iterations)

    @property
    def traits(self) -> Traits:
        """Evens the choice over the tokens of a scope in training."""
        return Traits(sees_others=True, evens_load=True)

    def score(
        self, params: Arrays, inputs: RouterInputs, *, top_k: int, train: bool, key: Key
    ) -> Scored:
        """Return the scores of the logits, and in training the plan as preference."""
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
