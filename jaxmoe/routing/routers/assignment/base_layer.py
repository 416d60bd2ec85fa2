# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""BASE layers: in training every expert gets its share of the tokens, exactly.

    z = x W,   score_ti = sigmoid(z_ti)
    training     balanced assignment, at most C = ceil(n K / E) of the n tokens of a scope to each
    evaluation   the K experts of largest z_ti

The assignment is greedy: the pairs of token and expert in the order of falling z, each taken while
the token wants one more expert and the expert has room. Where no z are equal that is the only
stable matching, and it is found with all tokens at once: each proposes to its best K experts that
have not turned it down, each expert keeps the best C that propose, until nobody is turned down
(ties: the lower expert, the lower token). The paper's auction maximises the sum of z instead;
greedy reaches at least half of a sum that has no negative terms.

With K = 1 (BASE, StableMoE) every token gets its expert, and where E divides n every expert has n/E
tokens. With K > 1 a token may find all the experts full that it has not already: it then has fewer,
its slot is empty, and no expert has more than C. StableMoE's second stage, a distilled and frozen
router, is not here.

A scope over several devices gathers its logits, n E numbers, and every device solves the same
problem.

Sources: BASE (arXiv 2103.16716, section 3.1), StableMoE (arXiv 2204.08396, section 3.1).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.parameters import Declaration, draw
from jaxmoe.routing.base import (
    RouterInputs,
    RouterOutput,
    RouterStatistics,
    Traits,
    chosen_experts,
)
from jaxmoe.routing.routers.token_choice.token_choice import (
    check_sizes,
    linear_declarations,
    linear_logits,
    token_output,
)
from jaxmoe.routing.scopes import Scope, join_scopes, scope_axes, split_scopes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BaseLayerConfig:
    """Sigmoid scores; in training a greedy assignment in which no expert exceeds its share."""

    name: ClassVar[str] = "base_layer"

    scope: Scope = "sequence"
    """Tokens that are shared out evenly: of each row of the batch, or of the micro-batch."""

    @property
    def traits(self) -> Traits:
        """Evens the choice over the tokens of a scope in training."""
        return Traits(sees_others=True, evens_load=True)

    def build(self, *, num_experts: int, top_k: int, embed_dim: int) -> BaseLayer:
        """The router for these sizes."""
        check_sizes(num_experts=num_experts, top_k=top_k)
        return BaseLayer(self, num_experts, top_k, embed_dim)


@dataclasses.dataclass(frozen=True)
class BaseLayer:
    """The router."""

    config: BaseLayerConfig
    num_experts: int
    top_k: int
    embed_dim: int

    def declarations(self) -> dict[str, Declaration]:
        """One matrix."""
        return linear_declarations(num_experts=self.num_experts, embed_dim=self.embed_dim)

    def init(self, key: Array) -> tuple[dict[str, Array], Any]:
        """Random parameters, no state."""
        return draw(self.declarations(), key), {}

    def route(
        self,
        params: dict[str, Array],
        state: Any,
        inputs: RouterInputs,
        *,
        train: bool,
        key: Array | None,
    ) -> RouterOutput:
        """The experts assigned; in evaluation the best."""
        del state, key
        logits = linear_logits(params, inputs)
        log_scores = jax.nn.log_sigmoid(logits)
        still = jax.lax.stop_gradient(logits)
        if train:
            is_open = self._balanced(still, inputs)
            best, expert_ids = jax.lax.top_k(jnp.where(is_open, still, -jnp.inf), self.top_k)
            expert_ids = jnp.where(jnp.isneginf(best), self.num_experts, expert_ids)
        else:
            _, expert_ids = jax.lax.top_k(still, self.top_k)
        is_chosen = expert_ids < self.num_experts
        chosen = jnp.take_along_axis(log_scores, jnp.where(is_chosen, expert_ids, 0), axis=1)
        return token_output(
            expert_ids,
            jnp.where(is_chosen, chosen, -jnp.inf),
            inputs,
            logits=logits,
            probs=jax.nn.softmax(log_scores, axis=-1),
        )

    def update(self, state: Any, statistics: RouterStatistics, step: Array) -> Any:
        """Nothing is kept."""
        del statistics, step
        return state

    def _balanced(self, logits: Float[Array, "T E"], inputs: RouterInputs) -> Bool[Array, "T E"]:
        """Which experts do not turn each token down."""
        extent, scope = inputs.extent, self.config.scope
        axes = scope_axes(extent, scope)
        index = inputs.context.get("index")
        if index is None:
            index = jnp.arange(logits.shape[0], dtype=jnp.int32)
        parts = (logits, inputs.token_mask, index)
        whole = [split_scopes(part, extent, scope) for part in parts]
        length = whole[0].shape[1]
        if axes:
            whole = [jax.lax.all_gather(part, axes, axis=1, tiled=True) for part in whole]
        is_open = assign(*whole, top_k=self.top_k)
        if axes:
            start = jax.lax.axis_index(axes) * length
            is_open = jax.lax.dynamic_slice_in_dim(is_open, start, length, axis=1)
        return join_scopes(is_open)


def assign(
    logits: Float[Array, "G n E"],
    is_real: Bool[Array, "G n"],
    index: Int[Array, "G n"],
    *,
    top_k: int,
) -> Bool[Array, "G n E"]:
    """The greedy assignment: the best K experts left to a token are its own.

    Args:
        logits: by which tokens and experts choose one another.
        is_real: False for padding, which nobody gets.
        index: number of each token, for ties.
        top_k: K.
    """
    num_experts = logits.shape[2]
    capacity = -(-is_real.sum(1, dtype=jnp.int32) * top_k // num_experts)[:, None, None]
    # Each expert's tokens, best first, and each token's place in that order.
    places = jnp.broadcast_to(jnp.arange(logits.shape[1])[None, :, None], logits.shape)
    ties = jnp.broadcast_to(index[:, :, None], logits.shape)
    order = jax.lax.sort((-logits, ties, places), dimension=1, num_keys=2, is_stable=True)[2]
    place = jnp.argsort(order, axis=1)

    def turn_down(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        is_open, _ = carry
        best = jax.lax.top_k(jnp.where(is_open, logits, -jnp.inf), top_k)[1]
        proposes = is_open & chosen_experts(best, num_experts)
        rank = jnp.cumsum(jnp.take_along_axis(proposes, order, axis=1), axis=1, dtype=jnp.int32)
        is_kept = jnp.take_along_axis(rank <= capacity, place, axis=1)
        is_down = proposes & ~is_kept
        return is_open & ~is_down, is_down.any()

    # One round first: the loop's carry then has the type that a round gives it.
    first = turn_down((is_real[:, :, None] & (logits == logits), jnp.array(True)))
    return jax.lax.while_loop(lambda carry: carry[1], turn_down, first)[0]
