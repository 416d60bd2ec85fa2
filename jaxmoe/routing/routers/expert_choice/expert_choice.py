# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Expert choice: each expert takes the c tokens of a scope that it scores highest.

    z    = x W                                         [T E], f32
    c    = max(floor(sum over real tokens t of k_t / E), 1)           per scope
    N_e  = the c tokens of largest z_te (or probability); ties to the lower token
    gate = softmax of z_t over the experts that took t                weights "post"
           softmax of z_t over all experts, not renormalised          weights "probability"
           sigmoid(z_te) / its sum over the experts that took t       weights "sigmoid"

A token may be taken by several experts or by none; in the latter case only the residual stream
carries it. The choice depends on all tokens of the scope, later ones included: the router is for
masked diffusion and encoders, and autoregressive generation refuses it. Loads are even by
construction, so balance losses are refused; the router z-loss is not.

In masked diffusion the mean number of experts of a token may follow the share r of the row that is
masked (context["mask_ratio"], the same along a row):

    k(r) = round(k_min + (k_max - k_min) g(r))
    g    : constant 1;  linear r;  linear_reverse 1 - r;  cosine (1 - cos pi r) / 2;
           cosine_reverse (1 + cos pi r) / 2;  gaussian, a bell at r = 1/2 of deviation 0.22,
           shifted and scaled to 0 at r = 0 and 1 and to 1 at 1/2;  gaussian_reverse 1 - gaussian

Shapes are those of k_max; unused slots at the end of each expert are empty. Where a scope is spread
over devices (`scopes.py`) the c-th largest value is found by counting, and ties go to the lowest
`context["index"]`.

Sources: Zhou et al. (arXiv 2202.09368, section 3.2), with weights "probability" and preference
"probability"; EC-DLM (arXiv 2604.01622) for weights "post", the choice by logits, and the
schedules, of which linear_reverse was best. Readings chosen: k is rounded half to even, c is
rounded down and at least 1, and padding is not counted.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.routing.base import (
    Arrays,
    Key,
    RouterBase,
    RouterInputs,
    RouterOutput,
    Selection,
    Traits,
    sum_statistics,
)
from jaxmoe.routing.routers.linear import SizedRouter, linear_logits
from jaxmoe.routing.scopes import (
    Scope,
    choose_largest,
    scope_axes,
    split_scopes,
    token_order,
    total,
)
from pallas_kernels.jax_versions import match_varying

CapacitySchedule = Literal[
    "constant",
    "linear",
    "linear_reverse",
    "cosine",
    "cosine_reverse",
    "gaussian",
    "gaussian_reverse",
]

EXPERT_TRAITS = Traits(
    is_causal=False,
    is_pointwise=False,
    sees_others=True,
    has_own_gates=True,
    has_own_load=True,
    is_token_major=False,
)
"""Traits of routers in which experts take tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertChoiceConfig(RouterBase):
    """Each expert takes its best tokens: even loads, not causal."""

    name: ClassVar[str] = "expert_choice"

    weights: Literal["post", "probability", "sigmoid"] = "post"
    """Gates: softmax over the experts that took the token, softmax over all experts, or sigmoid
    normalised over those that took it."""
    preference: Literal["logits", "probability"] = "logits"
    """Criterion by which an expert orders the tokens."""
    schedule: CapacitySchedule = "constant"
    """Mean number of experts of a token as a function of the share of masked tokens."""
    k_min: int = 1
    """Smallest mean number of experts of a token; unused by the schedule `constant`."""
    k_max: int | None = None
    """Largest mean number of experts of a token, at most moe.top_k; moe.top_k when None."""
    scope: Scope = "sequence"
    """Tokens that an expert chooses from: each row of the batch, or the micro-batch."""

    def __post_init__(self):
        if self.k_min < 1:
            raise ValueError(f"router.k_min={self.k_min} must be at least 1")
        if self.k_max is not None and self.k_max < self.k_min:
            raise ValueError(
                f"router.k_max={self.k_max} must not be below router.k_min={self.k_min}"
            )

    @property
    def traits(self) -> Traits:
        """Not causal; its scores are the gates, and its load is even."""
        return dataclasses.replace(EXPERT_TRAITS, is_rowwise=self.scope == "sequence")


def scheduled_k(
    ratio: Float[Array, "*d"], *, schedule: CapacitySchedule, k_min: int, k_max: int
) -> Int[Array, "*d"]:
    """Return k(r), the mean number of experts of a token.

    Args:
        ratio: Share r of masked tokens, in [0, 1].
        schedule: Shape of k(r); see the module.
        k_min: Smallest k.
        k_max: Largest k.
    """
    low = math.exp(-0.5 * (0.5 / 0.22) ** 2)
    width = 0.22
    bell = (jnp.exp(-0.5 * ((ratio - 0.5) / width) ** 2) - low) / (1.0 - low)
    share = {
        "constant": jnp.ones_like(ratio),
        "linear": ratio,
        "linear_reverse": 1.0 - ratio,
        "cosine": 0.5 * (1.0 - jnp.cos(jnp.pi * ratio)),
        "cosine_reverse": 0.5 * (1.0 + jnp.cos(jnp.pi * ratio)),
        "gaussian": bell,
        "gaussian_reverse": 1.0 - bell,
    }[schedule]
    number = jnp.round(k_min + (k_max - k_min) * share).astype(jnp.int32)
    return jnp.clip(number, k_min, k_max)


@dataclasses.dataclass(frozen=True)
class ExpertChoice(SizedRouter):
    """The router.

    Raises:
        ValueError: `k_min` or `k_max` exceeds `top_k`.
    """

    def __post_init__(self):
        SizedRouter.__post_init__(self)
        for field in ("k_max", "k_min"):
            value = getattr(self.config, field)
            if (value or 1) > self.top_k:
                raise ValueError(
                    f"a schedule above K_max: router.{field}={value} must not exceed"
                    f" moe.top_k={self.top_k}, for which the slots are allocated: raise moe.top_k"
                    f" or lower router.{field}"
                )

    def route(
        self, params: Arrays, state: Any, inputs: RouterInputs, *, train: bool, key: Key
    ) -> RouterOutput:
        """Choose the tokens that each expert takes."""
        del state, train, key
        logits = linear_logits(params, inputs)
        probs = jax.nn.softmax(logits, axis=-1)
        by_logits = self.config.preference == "logits"
        preference = jax.lax.stop_gradient(logits if by_logits else probs)
        token_ids, is_taken = self._take(preference, inputs)
        experts = jnp.arange(self.num_experts, dtype=jnp.int32)[:, None, None]
        expert_ids = jnp.where(is_taken, experts, self.num_experts).reshape(-1)  # A = E*G*C
        token_ids = token_ids.reshape(-1)
        # Empty slots write to the additional column E.
        nothing = jnp.zeros((logits.shape[0], self.num_experts + 1), bool)
        taken_TE = match_varying(nothing, token_ids, expert_ids)
        taken_TE = taken_TE.at[token_ids, expert_ids].set(True)[:, :-1]
        log_gates = jnp.pad(self._log_gates(logits, taken_TE), ((0, 0), (0, 1)))
        scores = log_gates[token_ids, expert_ids]
        is_taken = expert_ids < self.num_experts
        selection = Selection(
            token_ids=token_ids,
            expert_ids=expert_ids,
            scores=jnp.where(is_taken, scores, -jnp.inf),
        )
        statistics = sum_statistics(logits, probs, expert_ids, inputs.token_mask)
        return RouterOutput(selection=selection, logits=logits, probs=probs, statistics=statistics)

    def capacity(self, inputs: RouterInputs) -> Int[Array, " G"]:
        """Return c of each scope, from its tokens that are not padding; 0 where there are none.

        Raises:
            ValueError: the schedule depends on the masked share, and `context` has no `mask_ratio`.
        """
        config = self.config
        k_max = self.config.k_max or self.top_k
        ratio = inputs.context.get("mask_ratio")
        if config.schedule == "constant":
            k = jnp.full(inputs.token_mask.shape, k_max, jnp.int32)
        elif ratio is None:
            raise ValueError(
                f"router.schedule={config.schedule} follows the share of masked tokens, and"
                " context has no mask_ratio: train by masked diffusion, or set the schedule to"
                " constant"
            )
        else:
            k = scheduled_k(ratio, schedule=config.schedule, k_min=config.k_min, k_max=k_max)
        # Integer sums: the rounding is the same on every mesh.
        axes = scope_axes(inputs.extent, config.scope)
        k = split_scopes(jnp.where(inputs.token_mask, k, 0), inputs.extent, config.scope)
        sums = total(k.sum(1, dtype=jnp.int32), axes)
        return jnp.where(sums > 0, jnp.maximum(sums // self.num_experts, 1), 0)

    def _take(
        self, preference: Float[Array, "T E"], inputs: RouterInputs
    ) -> tuple[Int[Array, "E G C"], Bool[Array, "E G C"]]:
        """Return the rows of the tokens that each expert takes, by scope, and which slots are
        filled."""
        extent = inputs.extent
        scope = self.config.scope
        axes = scope_axes(extent, scope)
        mask = split_scopes(inputs.token_mask, extent, scope)
        values = split_scopes(preference, extent, scope)
        # Some sorts order -0 before 0.
        values = jnp.where(values == 0.0, 0.0, values)
        values = jnp.where(mask[:, :, None], values, -jnp.inf)
        groups, length = mask.shape
        capacity = self.capacity(inputs)
        number = jnp.broadcast_to(capacity[:, None], (groups, self.num_experts))
        slots = min(length, max(length * self.top_k // self.num_experts, 1))
        if axes:
            order = token_order(inputs, scope)
            is_chosen = choose_largest(values, capacity, mask, order, axes)
            values = jnp.where(is_chosen, values, -jnp.inf)
            number = is_chosen.sum(1, dtype=jnp.int32)
            # All tokens that an expert takes may be on one device.
            shards = math.prod(jax.lax.axis_size(axis) for axis in axes)
            slots = min(length, max(shards * length * self.top_k // self.num_experts, 1))
        _, rows = jax.lax.top_k(values.swapaxes(1, 2), slots)  # G, E, C; of equals the first
        is_taken = jnp.arange(slots, dtype=jnp.int32)[None, None, :] < number[:, :, None]
        first = jnp.arange(groups, dtype=jnp.int32)[:, None, None] * length
        rows = jnp.where(is_taken, rows.astype(jnp.int32), 0) + first
        return rows.swapaxes(0, 1), is_taken.swapaxes(0, 1)

    def _log_gates(
        self, logits: Float[Array, "T E"], is_taken: Bool[Array, "T E"]
    ) -> Float[Array, "T E"]:
        """Return the logarithm of the gate of each taken pair."""
        weights = self.config.weights
        if weights == "probability":
            return jax.nn.log_softmax(logits, axis=-1)
        scores = logits if weights == "post" else jax.nn.log_sigmoid(logits)
        # For a token without experts all terms are kept, so that its logsumexp is finite.
        is_seen = is_taken | ~is_taken.any(-1, keepdims=True)
        return scores - jax.nn.logsumexp(scores, axis=-1, where=is_seen, keepdims=True)


ExpertChoiceConfig.router = ExpertChoice
