# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Token rounding: in training the load of each expert is a multiple of a tile M of rows.

A kernel computes whole tiles, so a load f costs ceil(f / M) M rows. Here the load itself changes:

    f_e      load of expert e in the scope, from the router's choice of K experts per token
    r_e      M round(f_e / M), of halves the even one                              "nearest"
             M (floor(f_e / M) + Bernoulli(f_e / M - floor(f_e / M)))              "stochastic"
    r_e < f_e   the expert drops the f_e - r_e tokens of smallest gate of those that chose it
    r_e > f_e   it takes the r_e - f_e tokens of largest gate of those that did not choose it
                (rounded down where there are fewer than r_e tokens)

So |r_e - f_e| is at most M / 2, or below M. Stochastic rounding keeps every load in expectation,
nearest rounding keeps the total where remainders are spread evenly.

**Gates.** What stays keeps its gate: nothing is renormalised, as with a limit. An added pair has
the gate that its score would have beside the chosen ones (`GateBase.pair_gates`). The score of a
pair that was not chosen follows from the router's probabilities,

    score_te = score_ti p_te / p_ti         i the chosen expert of largest score

which is exact for every router whose scores are in proportion to its probabilities in each token:
softmax before and after the choice, sigmoid, sqrt(softplus). Ties go to the earlier token.

**Training only.** Evaluation, decoding and serving compute the router's choice, plain top-k. A
token's experts depend on later tokens of the scope in training, as with expert choice.

**Slots.** The T*K slots of the choice, some of them emptied, and behind them for each scope and
expert at most M / 2 (nearest) or M - 1 (stochastic) slots for added tokens. Empty slots cost memory
and no products: with scope "sequence" E M / 2 beside S K rows, with scope "batch" as many beside
all rows of a device. They are in no order of tokens: what cuts or moves assignments by token
(chunks of a dispatcher, token routes) refuses them, as those of expert choice.

**Meshes.** Loads are those of a scope, wherever its tokens are, so a loss does not depend on the
mesh. With scope "sequence" the loads of every row are multiples of M, and so is their sum over any
rows. The rows of an expert that a device computes are therefore whole tiles, alone and with every
dispatcher that computes an expert's rows in one place, if whole sequences are behind them; where
positions of a sequence are on devices that do not share an expert, their rows together are. With
scope "batch" the loads of the micro-batch over all devices are multiples. Those of a device are
where it computes all rows of its experts: on one device, or with experts spread over all axes of
the batch. Fewer tokens change then, because an expert has one remainder per micro-batch and not one
per row. Random numbers belong to a scope and an expert, not to a device.

Source: SonicMoE (arXiv 2512.14080, and its repository for the order of tokens and halves). There
tokens that chose an expert are ordered by their scores over the K chosen, and the others by those
over all experts; here both are ordered by gate.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.routing.base import (
    Arrays,
    Key,
    RouterInputs,
    Selection,
    chosen_experts,
)
from jaxmoe.routing.capacity import ADDED, CapacityBase, CapacityTraits, RouterChoice
from jaxmoe.routing.routers.noise import require_key
from jaxmoe.routing.scopes import (
    Scope,
    choose_largest,
    join_scopes,
    scope_axes,
    split_scopes,
    token_order,
    total,
)
from sharding.assignments import Assignments

_KEY_NUMBER = 2512
"""Separates the random numbers from those that a router draws from the same key."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenRoundingConfig(CapacityBase):
    """In training, rounds the load of each expert to a multiple of a kernel's tile."""

    name: ClassVar[str] = "token_rounding"

    tile: int = 128
    """Rows M of which a load is a multiple: a tile of the grouped product."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest multiple, or up with the probability that keeps the load in expectation."""
    scope: Scope = "sequence"
    """Tokens that share one load: those of each row of the batch, or of the micro-batch."""

    def __post_init__(self):
        if self.tile < 1:
            raise ValueError(f"capacity.tile={self.tile} must be at least 1")

    @property
    def traits(self) -> CapacityTraits:
        """For training; adds assignments behind those of the tokens."""
        is_by_row = self.scope == "sequence"
        return CapacityTraits(
            row_slots=self.most_added if is_by_row else 0,
            batch_slots=0 if is_by_row else self.most_added,
            is_for_training=True,
            is_token_major=False,
            needs_sequences=False,
            has_zero_computation=False,
        )

    @property
    def most_added(self) -> int:
        """Largest number of tokens that an expert adds in a scope."""
        return self.tile // 2 if self.rounding == "nearest" else self.tile - 1

    def check_length(self, length: int, *, top_k: int, num_experts: int) -> None:
        """Check that an even load of a sequence is at least one tile, where its loads are rounded.

        Raises:
            ValueError: It is less, and rounding would leave most experts without a token.
        """
        if self.scope == "sequence":
            self._check_even_load(length, top_k=top_k, num_experts=num_experts)

    def _check_even_load(self, num_tokens: int, *, top_k: int, num_experts: int) -> None:
        is_even = self.tile == 1 or num_tokens * top_k >= self.tile * num_experts
        if is_even or num_tokens == 0:  # of no tokens none is left out
            return
        load = num_tokens * top_k / num_experts
        largest = max(1, math.floor(load))
        raise ValueError(
            f"moe.capacity.tile={self.tile} exceeds the even load of an expert, {num_tokens} tokens"
            f" times {top_k} of {num_experts} experts, {load:g}: rounding would leave experts"
            f" without tokens; set moe.capacity.tile to {largest} or less"
            f"{', or moe.capacity.scope to batch' * (self.scope == 'sequence')}"
        )

    def sized_for(self, *, rows_per_expert: float) -> TokenRoundingConfig:
        """Return the config with the largest power of 2 of which an even load has two."""
        tile = 2 ** max(0, math.floor(math.log2(rows_per_expert / 2)))
        return dataclasses.replace(self, tile=min(self.tile, tile))

    def advice(self, *, top_k: int, num_experts: int, num_free: int, is_causal: bool) -> list[str]:
        """Return nothing: evaluation is plain top-k."""
        del top_k, num_experts, num_free, is_causal
        return []

    def assign(self, choice: RouterChoice) -> tuple[Assignments, Arrays]:
        """Drop and add assignments until every load is a multiple of the tile."""
        assignments = choice.assignments
        selection = choice.output.selection
        num_experts = choice.num_experts
        if assignments.top_k is None:
            raise ValueError(
                "token_rounding needs token-major assignments: this router sets its own load"
            )
        scores = pair_scores(selection, choice.output.probs)
        gates_TE = choice.gate.pair_gates(selection, selection.scores, scores)
        ids_TK = assignments.expert_ids.reshape(-1, assignments.top_k)
        is_chosen = chosen_experts(ids_TK, num_experts)
        is_computed = self._choose(is_chosen, gates_TE, choice)

        # The router's own slots, those of dropped tokens emptied.
        experts = jnp.minimum(ids_TK, num_experts - 1)
        is_kept = jnp.take_along_axis(is_computed, experts, axis=1) & (ids_TK < num_experts)
        is_kept = is_kept.reshape(-1)
        kept_ids = jnp.where(is_kept, assignments.expert_ids, num_experts)
        kept_gates = jnp.where(is_kept, assignments.gates, 0.0)

        # The slots of added tokens, by scope and expert.
        token_ids, expert_ids = self._added_pairs(is_computed & ~is_chosen, choice.inputs)
        is_added = expert_ids < num_experts
        added_gates = gates_TE[token_ids, jnp.minimum(expert_ids, num_experts - 1)]
        rounded = Assignments(
            token_ids=jnp.concatenate([assignments.token_ids, token_ids]),
            expert_ids=jnp.concatenate([kept_ids, expert_ids]),
            gates=jnp.concatenate([kept_gates, jnp.where(is_added, added_gates, 0.0)]),
        )
        return rounded, {ADDED: is_added.sum(dtype=jnp.float32)}

    def _choose(
        self,
        is_chosen: Bool[Array, "T E"],
        gates: Float[Array, "T E"],
        choice: RouterChoice,
    ) -> Bool[Array, "T E"]:
        """Return which pairs are computed: for each expert and scope a multiple of the tile."""
        inputs = choice.inputs
        extent = inputs.extent
        top_k = choice.assignments.top_k
        assert top_k is not None  # `assign` has looked
        axes = scope_axes(extent, self.scope)
        chosen = split_scopes(is_chosen, extent, self.scope)  # G, n, E
        mask = split_scopes(inputs.token_mask, extent, self.scope)  # G, n
        groups, length, num_experts = chosen.shape
        shards = math.prod(jax.lax.axis_size(axis) for axis in axes)
        self._check_even_load(length * shards, top_k=top_k, num_experts=num_experts)
        order = token_order(inputs, self.scope)
        load = total(chosen.sum(1, dtype=jnp.int32), axes)  # G, E
        most = total(mask.sum(1, dtype=jnp.int32), axes)[:, None]  # G, 1
        target = self._round(load, most, order, axes, choice.key)

        # Fewer: the best of those that chose the expert. More: the best of the others, too.
        is_raised = target > load
        candidates = mask[:, :, None] & (chosen != is_raised[:, None, :])
        number = jnp.where(is_raised, target - load, target)
        values = split_scopes(jax.lax.stop_gradient(gates), extent, self.scope)
        columns = (groups * num_experts, length)
        best = choose_largest(
            values.swapaxes(1, 2).reshape(*columns, 1),
            number.reshape(-1),
            candidates.swapaxes(1, 2).reshape(columns),
            jnp.repeat(order, num_experts, axis=0),
            axes,
        )
        best = best.reshape(groups, num_experts, length).swapaxes(1, 2)
        return join_scopes(best | (chosen & is_raised[:, None, :]))

    def _round(
        self,
        load: Int[Array, "G E"],
        most: Int[Array, "G 1"],
        order: Int[Array, "G n"],
        axes: tuple[str, ...],
        key: Key,
    ) -> Int[Array, "G E"]:
        """Return the loads to be had, multiples of the tile of at most `most` tokens."""
        tile = self.tile
        tiles = load // tile
        remainder = load - tiles * tile
        if self.rounding == "nearest":
            is_up = 2 * remainder + tiles % 2 > tile  # of halves the even one
        else:
            largest = jnp.iinfo(order.dtype).max
            first = order.min(axis=1, initial=largest)  # the same on every mesh
            first = jax.lax.pmin(first, axes) if axes else first
            key = jax.random.fold_in(require_key(key), _KEY_NUMBER)
            keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, first)
            drawn = jax.vmap(lambda k: jax.random.randint(k, (load.shape[1],), 0, tile))(keys)
            is_up = drawn < remainder
        is_up = is_up & ((tiles + 1) * tile <= most)
        return (tiles + is_up.astype(jnp.int32)) * tile

    def _added_pairs(
        self, is_added: Bool[Array, "T E"], inputs: RouterInputs
    ) -> tuple[Int[Array, " a"], Int[Array, " a"]]:
        """Return tokens and experts of the added pairs, in slots of each scope and expert."""
        added = split_scopes(is_added, inputs.extent, self.scope).swapaxes(1, 2)  # G, E, n
        groups, num_experts, length = added.shape
        slots = min(self.most_added, length)
        is_filled, rows = jax.lax.top_k(added.astype(jnp.float32), slots)  # of equals the first
        first = jnp.arange(groups, dtype=jnp.int32)[:, None, None] * length
        experts = jnp.arange(num_experts, dtype=jnp.int32)[None, :, None]
        expert_ids = jnp.where(is_filled > 0.0, experts, num_experts)
        token_ids = jnp.where(is_filled > 0.0, rows.astype(jnp.int32) + first, 0)
        return token_ids.reshape(-1), expert_ids.reshape(-1)


def pair_scores(selection: Selection, probs: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """Return the logarithms of the scores of all pairs, on the scale of each token's choice.

    Args:
        selection: Chosen pairs, token-major.
        probs: Probabilities, to which the scores of a token are in proportion.
    """
    assert selection.top_k is not None
    log_probs = jnp.log(jnp.maximum(probs, jnp.finfo(probs.dtype).tiny))
    scores_TK = selection.scores.reshape(-1, selection.top_k)  # A = T*K
    ids_TK = selection.expert_ids.reshape(-1, selection.top_k)
    slot = jnp.argmax(scores_TK, axis=1, keepdims=True)
    score = jnp.take_along_axis(scores_TK, slot, axis=1)  # T, 1
    expert = jnp.minimum(jnp.take_along_axis(ids_TK, slot, axis=1), probs.shape[1] - 1)
    has_expert = ~jnp.isneginf(score)
    shift = jnp.where(has_expert, score, 0.0) - jnp.take_along_axis(log_probs, expert, axis=1)
    return log_probs + jnp.where(has_expert, shift, 0.0)
