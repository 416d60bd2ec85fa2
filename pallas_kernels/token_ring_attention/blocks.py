# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Selects the block that a rank computes with the queries of another rank.

The block has the same shape on every rank; it depends on the visits of the schedule:

    halves   the two half blocks, stacked in the batch, without causality (ring/half_blocks.py)
    later    all x all without causality; the result is dropped where the queries are earlier ones
    every    all x all, masked by positions
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool
from pallas_kernels.flash_attention.kernels import AttentionOperands
from pallas_kernels.flash_attention.mask import Rules, Tokens
from pallas_kernels.ring import half_blocks
from pallas_kernels.ring.half_blocks import HalfBlocks, halves
from pallas_kernels.ring.online_softmax import SoftmaxState
from pallas_kernels.token_ring_attention.circulate import QueryRing


class Shard(NamedTuple):
    """Positions and segments of a rank's tokens, or of a piece of them; a pytree of [B S] i32."""

    positions: Array | None
    """Positions; None if they rise along every segment as the layout implies."""
    segment_ids: Array | None

    def split(self, pieces: int) -> "list[Shard]":
        """Return the shards of the pieces."""
        parts = [[None] * pieces if x is None else jnp.split(x, pieces, axis=1) for x in self]
        return [Shard(*part) for part in zip(*parts, strict=True)]

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays that are not None; they travel with the queries."""
        return tuple(x for x in self if x is not None)

    def like(self, arrays: Sequence[Array]) -> "Shard":
        """Return the shard of other tokens, from their `arrays`."""
        leaves = iter(arrays)
        return Shard(*(None if x is None else next(leaves) for x in self))

    @property
    def tokens(self) -> Tokens:
        """Tokens of a rank's attention to itself."""
        return Tokens(self.positions, self.positions, self.segment_ids, self.segment_ids)


class QueryBlock(NamedTuple):
    """Block of one step after the first. Queries come by pieces, keys as a rank holds them."""

    ring: QueryRing
    step: int
    is_earlier: Bool[Array, ""]
    """Whether the queries come from an earlier rank than the keys."""

    @classmethod
    def at(cls, ring: QueryRing, step: int) -> "QueryBlock":
        """Return the block of this rank at a step."""
        return cls(ring, step, jax.lax.axis_index(ring.axis_name) + step >= ring.schedule.ranks)

    @property
    def visits(self) -> str:
        """Visits of the schedule."""
        return self.ring.schedule.visits

    @property
    def rules(self) -> Rules:
        """Mask rules of the block."""
        rules = self.ring.rules
        return rules if self.visits == "every" else dataclasses.replace(rules, causal=False)

    def queries(self, pieces: Sequence[Array]) -> Array:
        """Return the queries of the block, or an array that belongs to them."""
        if self.visits != "halves":
            return pieces[0]
        return half_blocks.stack_queries(HalfBlocks(*pieces), self.is_earlier)

    def keys(self, x: Array) -> Array:
        """Return the keys of the block, or an array that belongs to them."""
        if self.visits != "halves":
            return x
        return half_blocks.stack_keys(halves(x), self.is_earlier)

    def operands(
        self, queries: Sequence[Array], k: Array, v: Array, tokens: Sequence[Shard], shard: Shard
    ) -> AttentionOperands:
        """Return what the block computes.

        Args:
            queries: Queries, by piece.
            k: Keys of this rank.
            v: Values of this rank.
            tokens: Shards of the queries, by piece.
            shard: Shard of the keys.
        """
        return AttentionOperands(
            self.queries(queries),
            self.keys(k),
            self.keys(v),
            self.tokens(tokens, shard),
            self.rules,
        )

    def tokens(self, pieces: Sequence[Shard], shard: Shard) -> Tokens:
        """Return positions and segments of the block.

        Args:
            pieces: Shards of the queries, by piece.
            shard: Shard of the keys.
        """
        sides = [
            (None, None) if keys is None else (self.queries(queries), self.keys(keys))
            for queries, keys in zip(zip(*pieces, strict=True), shard, strict=True)
        ]
        (q_positions, kv_positions), (q_segment_ids, kv_segment_ids) = sides
        return Tokens(q_positions, kv_positions, q_segment_ids, kv_segment_ids)

    def merge(self, state: SoftmaxState) -> list[SoftmaxState]:
        """Return the softmax states of the pieces of the queries, in float32."""
        if self.visits == "halves":
            return list(half_blocks.merge_queries(state, self.is_earlier))
        state = SoftmaxState(state.out.astype(jnp.float32), state.lse)
        return [half_blocks.seen_if(~self.is_earlier, state) if self.visits == "later" else state]

    def summed_queries(self, x: Array) -> list[Array]:
        """Return the block's gradient by piece of the queries."""
        if self.visits == "halves":
            return list(half_blocks.sum_queries(x, self.is_earlier))
        return [self._valid(x)]

    def summed_keys(self, x: Array) -> Array:
        """Return the block's gradient of the keys that the rank holds."""
        if self.visits == "halves":
            return jnp.concatenate(half_blocks.sum_keys(x, self.is_earlier), axis=1)
        return self._valid(x)

    def _valid(self, x: Array) -> Array:
        if self.visits == "every":
            return x
        return jnp.where(self.is_earlier, jnp.zeros_like(x), x)
