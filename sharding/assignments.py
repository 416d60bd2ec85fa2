# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`Assignments` of tokens to experts, with their weights.

Dispatch, experts and combine read nothing else of a router and its gate. A slot whose expert id is
E (the number of experts) is empty: nothing is sent, and its gate is exactly 0.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Assignments:
    """A slots, each a token, an expert and a gate."""

    token_ids: Int[Array, " A"]
    """Row of the token in the batch that was routed."""
    expert_ids: Int[Array, " A"]
    """Expert, or E where the slot is empty."""
    gates: Float[Array, " A"]
    """Factor on the expert's output, f32; exactly 0 where the slot is empty."""
    top_k: int | None = dataclasses.field(default=None, metadata={"static": True})
    """K when token-major (A = T*K, token t owns slots t*K to t*K+K-1): combine is then a gather
    and a sum over K. None for any other order."""


def combine(
    rows: Float[Array, "A D"],
    assignments: Assignments,
    num_tokens: int,
    *,
    is_weighted: bool = False,
) -> Float[Array, "T D"]:
    """Return the sum of the experts' outputs per token, weighted by the gates.

    Args:
        rows: Output of each assignment, in the order of the assignments; any finite value where
            the slot is empty.
        assignments: Tokens and gates of the rows.
        num_tokens: T.
        is_weighted: Whether the rows are outputs times gates already, 0 where the slot is empty.

    Returns:
        Sums in the dtype of `rows`, taken in f32.
    """
    weighted = rows.astype("float32")
    if not is_weighted:
        weighted = weighted * assignments.gates[:, None]
    if assignments.top_k is not None:
        by_token = weighted.reshape(num_tokens, assignments.top_k, rows.shape[1])
        return by_token.sum(1).astype(rows.dtype)
    summed = jax.ops.segment_sum(weighted, assignments.token_ids, num_segments=num_tokens)
    return summed.astype(rows.dtype)


def own_positions(
    rows: Shaped[Array, "T ..."], num_sequences: int, axes: tuple[str, ...]
) -> Shaped[Array, "t ..."]:
    """Return this device's part of the positions of each sequence.

    Args:
        rows: Rows of whole sequences, one sequence after the other.
        num_sequences: B.
        axes: Mesh axes over which positions are sharded.
    """
    by_sequence = rows.reshape(num_sequences, -1, *rows.shape[1:])
    length = by_sequence.shape[1] // jax.lax.axis_size(axes)
    first = jax.lax.axis_index(axes) * length
    positions = jax.lax.dynamic_slice_in_dim(by_sequence, first, length, axis=1)
    return positions.reshape(num_sequences * length, *rows.shape[1:])


def own_assignments(
    assignments: Assignments, num_sequences: int, axes: tuple[str, ...]
) -> Assignments:
    """Return the assignments of `own_positions`, with token ids that count its rows.

    Args:
        assignments: Token-major assignments of whole sequences.
        num_sequences: B.
        axes: Mesh axes over which positions are sharded.
    """
    top_k = assignments.top_k
    assert top_k is not None  # only token-major routers have a capacity

    def own_rows(slots: Array) -> Array:
        return own_positions(slots.reshape(-1, top_k), num_sequences, axes).reshape(-1)

    expert_ids = own_rows(assignments.expert_ids)
    return Assignments(
        token_ids=jnp.arange(expert_ids.shape[0], dtype=jnp.int32) // jnp.int32(top_k),
        expert_ids=expert_ids,
        gates=own_rows(assignments.gates),
        top_k=top_k,
    )
