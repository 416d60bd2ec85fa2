# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sorts assignments by expert on one device, without communication.

With E = 3 experts and token-major assignments of T = 3 tokens, K = 2:

    slot        0 1 2 3 4 5
    expert_ids  2 0 1 3 0 2      (3 = E: empty)
    order       1 4 2 0 5 3      slots by expert, ties in slot order, empty ones last
    inverse     3 0 2 5 1 4      sorted position of each slot
    group_sizes 2 1 2            rows of experts 0, 1, 2; the last row is in no group
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

ORDER = "expert_order"
"""Name, for `jax.checkpoint`, of a few numbers a row that a sort or an exchange makes: orders by
expert, sizes of groups, gates."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Permutation:
    """Order of the A assignment slots in which every expert's rows are contiguous."""

    order: Int[Array, " A"]
    """Slot at each sorted position."""
    inverse: Int[Array, " A"]
    """Sorted position of each slot."""
    group_sizes: Int[Array, " E"]
    """Rows of each expert."""


def sort_by_expert(expert_ids: Int[Array, " A"], num_experts: int) -> Permutation:
    """Return the stable order by expert; empty slots (id E) come last and are in no group.

    Args:
        expert_ids: Values in [0, E].
        num_experts: E.
    """
    slots = jnp.arange(expert_ids.shape[0], dtype=jnp.int32)
    _, order = jax.lax.sort((expert_ids.astype(jnp.int32), slots), num_keys=1, is_stable=True)
    inverse = jnp.argsort(order).astype(jnp.int32)
    result = Permutation(order=order, inverse=inverse, group_sizes=loads(expert_ids, num_experts))
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, ORDER), result)


def loads(expert_ids: Int[Array, " A"], num_experts: int) -> Int[Array, " E"]:
    """Return the assignments per expert; empty slots are not counted."""
    is_expert = expert_ids[:, None] == jnp.arange(num_experts, dtype=expert_ids.dtype)[None, :]
    return is_expert.sum(0, dtype=jnp.int32)


@jax.custom_vjp
def permute_rows(
    rows: Float[Array, "A D"], order: Int[Array, " A"], inverse: Int[Array, " A"]
) -> Float[Array, "A D"]:
    """Return `rows[order]`, with a gather as gradient: for a permutation, `inverse` undoes it.

    The scatter-add that JAX derives is slow on accelerators and on the CPU.
    """
    return rows[order]


def _permute_forward(rows, order, inverse):
    return rows[order], inverse


def _permute_backward(inverse, gradient):
    return gradient[inverse], None, None


permute_rows.defvjp(_permute_forward, _permute_backward)


@jax.custom_vjp
def move_rows(
    rows: Float[Array, "m D"], sources: Int[Array, " n"], targets: Int[Array, " m"]
) -> Float[Array, "n D"]:
    """Move rows to fewer or more places; the gradient is a gather.

    Args:
        rows: Rows, each of which moves to one place at most.
        sources: Row of each place; m where it has none, and the place is 0.
        targets: Place of each row; n where it has none. The inverse of `sources`.
    """
    return rows.at[sources].get(mode="fill", fill_value=0)


def _move_forward(rows, sources, targets):
    return move_rows(rows, sources, targets), (sources, targets)


def _move_backward(places, gradient):
    sources, targets = places
    return move_rows(gradient, targets, sources), None, None


move_rows.defvjp(_move_forward, _move_backward)


def repeat_tokens(x: Float[Array, "T D"], top_k: int) -> Float[Array, "A D"]:
    """Return one row per token-major assignment: each token K times."""
    rows_TKD = jnp.broadcast_to(x[:, None, :], (x.shape[0], top_k, x.shape[1]))
    return rows_TKD.reshape(-1, x.shape[1])  # A = T*K rows
