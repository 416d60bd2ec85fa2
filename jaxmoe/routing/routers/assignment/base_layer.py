# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""BASE layers: in training a greedy assignment limits every expert to its share of the tokens.

    z = x W,   score_ti = sigmoid(z_ti)
    training     balanced assignment, at most C = ceil(n K / E) of the n tokens of a scope to each
    evaluation   the K experts of largest z_ti

The assignment is greedy: pairs of token and expert are taken in the order of decreasing z while the
token has fewer than K experts and the expert fewer than C tokens. Without ties in z this is the
unique stable matching, and deferred acceptance finds it for all tokens at once: each token proposes
to its best K experts that have not rejected it, each expert keeps the best C proposals, until there
are no rejections (ties: the lower expert, the lower token). The paper's auction maximises the sum
of z instead; greedy reaches at least half of that sum where no term is negative.

With K = 1 (BASE, StableMoE) every token gets an expert, and if E divides n every expert has n/E
tokens. With K > 1 all experts that a token does not have yet may be full: the token then has fewer
than K experts and an empty slot. StableMoE's second stage, a distilled and frozen router, is not
implemented.

For a scope that spans several devices the logits, n E numbers, are gathered and every device solves
the same problem.

Sources: BASE (arXiv 2103.16716, section 3.1), StableMoE (arXiv 2204.08396, section 3.1).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.routing.base import (
    Arrays,
    Key,
    RouterBase,
    RouterInputs,
    RouterOutput,
    Traits,
    chosen_experts,
)
from jaxmoe.routing.routers.linear import SizedRouter, linear_logits, token_output
from jaxmoe.routing.routers.noise import token_index
from jaxmoe.routing.scopes import Scope, join_scopes, scope_axes, split_scopes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BaseLayerConfig(RouterBase):
    """Sigmoid scores; in training a greedy assignment in which no expert exceeds its share."""

    name: ClassVar[str] = "base_layer"

    scope: Scope = "sequence"
    """Tokens that are assigned together: each row of the batch, or the micro-batch."""

    @property
    def traits(self) -> Traits:
        """Evens the choice over the tokens of a scope in training."""
        return Traits(sees_others=True, evens_load=True)


@dataclasses.dataclass(frozen=True)
class BaseLayer(SizedRouter):
    """The router."""

    def route(
        self, params: Arrays, state: Any, inputs: RouterInputs, *, train: bool, key: Key
    ) -> RouterOutput:
        """Return the assigned experts in training, the best ones in evaluation."""
        del state, key
        logits = linear_logits(params, inputs)
        log_scores = jax.nn.log_sigmoid(logits)
        still = jax.lax.stop_gradient(logits)
        if train:
            is_open = self._balance(still, inputs)
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

    def _balance(self, logits: Float[Array, "T E"], inputs: RouterInputs) -> Bool[Array, "T E"]:
        """Return which experts do not reject each token."""
        extent = inputs.extent
        scope = self.config.scope
        axes = scope_axes(extent, scope)
        parts = (logits, inputs.token_mask, token_index(inputs))
        scopes = [split_scopes(part, extent, scope) for part in parts]
        length = scopes[0].shape[1]
        if axes:
            scopes = [jax.lax.all_gather(part, axes, axis=1, tiled=True) for part in scopes]
        is_open = assign(*scopes, top_k=self.top_k)
        if axes:
            start = jax.lax.axis_index(axes) * length
            is_open = jax.lax.dynamic_slice_in_dim(is_open, start, length, axis=1)
        return join_scopes(is_open)


BaseLayerConfig.router = BaseLayer


def assign(
    logits: Float[Array, "G n E"],
    is_real: Bool[Array, "G n"],
    index: Int[Array, "G n"],
    *,
    top_k: int,
) -> Bool[Array, "G n E"]:
    """Solve the greedy assignment by deferred acceptance.

    Args:
        logits: Preference of tokens for experts and of experts for tokens.
        is_real: False for padding, which is not assigned.
        index: Number of each token, which breaks ties.
        top_k: K.

    Returns:
        Which experts have not rejected each token; the best K of them are the token's.
    """
    num_experts = logits.shape[2]
    capacity = -(-is_real.sum(1, dtype=jnp.int32) * top_k // num_experts)[:, None, None]
    # Tokens of each expert in the order of preference, and the place of each token in that order.
    places = jnp.broadcast_to(jnp.arange(logits.shape[1])[None, :, None], logits.shape)
    ties = jnp.broadcast_to(index[:, :, None], logits.shape)
    order = jax.lax.sort((-logits, ties, places), dimension=1, num_keys=2, is_stable=True)[2]
    place = jnp.argsort(order, axis=1)

    def reject(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        is_open, _ = carry
        best = jax.lax.top_k(jnp.where(is_open, logits, -jnp.inf), top_k)[1]
        proposes = is_open & chosen_experts(best, num_experts)
        rank = jnp.cumsum(jnp.take_along_axis(proposes, order, axis=1), axis=1, dtype=jnp.int32)
        is_kept = jnp.take_along_axis(rank <= capacity, place, axis=1)
        is_rejected = proposes & ~is_kept
        return is_open & ~is_rejected, is_rejected.any()

    # The first round is outside the loop, so that the carry has the type a round returns.
    first = reject((is_real[:, :, None] & (logits == logits), jnp.array(True)))
    return jax.lax.while_loop(lambda carry: carry[1], reject, first)[0]
