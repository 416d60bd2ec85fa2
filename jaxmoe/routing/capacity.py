# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Capacity: a limit on the assignments of an expert within a row of the batch.

    C = ceil(factor * S * K / E)      per row of the batch (scope "sequence") and expert

With Z experts without computation besides the E that compute, and tau = `computing_share`:

    C = ceil(factor * tau * S * K / (tau * E + Z)),   C_free = ceil(factor * S * K / (tau * E + Z))

Assignments beyond C are dropped: the gate becomes 0, the slot empty, and the drop is counted. The
remaining gates are not renormalized. The scope is a row of the batch, so what is dropped depends
neither on the mesh nor on the number of micro-batches. Without a capacity (the default) nothing is
dropped.

S counts the positions of a row including padding, and K is `moe.top_k` even where a schedule uses
fewer. Evaluation drops as training does. With keep="gate" a later token can displace an earlier
one; causal models need keep="position". Generation with a cache routes one token at a time, which
never exceeds a capacity.

Sources: GShard (arXiv 2006.16668, section 2.2) for `position`; Megatron-LM's "probs" for `gate`;
MoE++ (arXiv 2410.07348, eq. 8) for the second form. The sum printed there has one assignment per
token; the reading chosen is K.
"""

from __future__ import annotations

import dataclasses
import fractions
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sharding.assignments import Assignments


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CapacityConfig:
    """Limits the assignments of an expert within one sequence; assignments beyond it are
    dropped."""

    factor: float = 1.25
    """Capacity over the even load; at E / top_k and above nothing is dropped."""
    keep: Literal["gate", "position"] = "gate"
    """Assignments that a full expert keeps: those of largest gate, or the first."""
    computing_share: float = 1.0
    """Target tau: load of an expert that computes over that of one that does not; only with
    zero_computation."""
    scope: Literal["sequence"] = "sequence"
    """Assignments that share one capacity: those of one row of the batch."""

    def __post_init__(self):
        if not 0.0 < self.factor < float("inf"):
            raise ValueError(f"capacity.factor={self.factor} must be finite and above 0")

        if not 0.0 < self.computing_share < float("inf"):
            raise ValueError(
                f"capacity.computing_share={self.computing_share} must be finite and above 0"
            )

    def rows(self, sequence_length: int, top_k: int, num_experts: int, *, num_free: int = 0) -> int:
        """Return C, the capacity of an expert that computes, in one sequence."""
        share = self._share(sequence_length, top_k, num_experts, num_free)
        return math.ceil(share * _as_written(self.computing_share))

    def free_rows(self, sequence_length: int, top_k: int, num_experts: int, num_free: int) -> int:
        """Return the capacity of an expert without computation, in one sequence."""
        return math.ceil(self._share(sequence_length, top_k, num_experts, num_free))

    def _share(
        self, sequence_length: int, top_k: int, num_experts: int, num_free: int
    ) -> fractions.Fraction:
        experts = _as_written(self.computing_share) * num_experts + num_free
        return _as_written(self.factor) * sequence_length * top_k / experts


def _as_written(number: float) -> fractions.Fraction:
    """Return the exact decimal value: 1.1 in binary exceeds 1.1 and would be rounded up."""
    return fractions.Fraction(repr(number))


def limit(
    assignments: Assignments,
    config: CapacityConfig,
    *,
    sequence_length: int,
    num_experts: int,
    num_free: int = 0,
) -> Assignments:
    """Empty the slots that exceed the capacity of their expert in their sequence.

    Args:
        assignments: Token-major assignments of whole, consecutive sequences.
        config: Factor and policy.
        sequence_length: Tokens S of a sequence.
        num_experts: Experts E that compute.
        num_free: Experts Z without computation, which have the last ids.

    Raises:
        ValueError: the assignments are not token-major.
    """
    if assignments.top_k is None:
        raise ValueError("capacity needs token-major assignments: this router sets its own load")
    slots = sequence_length * assignments.top_k
    sizes = (sequence_length, assignments.top_k, num_experts)
    capacity = jnp.full((num_experts,), config.rows(*sizes, num_free=num_free), jnp.int32)
    if num_free:
        free = jnp.full((num_free,), config.free_rows(*sizes, num_free), jnp.int32)
        capacity = jnp.concatenate([capacity, free])
    ids = assignments.expert_ids.reshape(-1, slots)  # sequences, S*K
    if config.keep == "gate":
        order = -jax.lax.stop_gradient(assignments.gates).reshape(-1, slots)
    else:
        order = jnp.zeros_like(assignments.gates).reshape(-1, slots)
    is_kept = jax.vmap(lambda i, o: _first(i, o, capacity))(ids, order).reshape(-1)
    return dataclasses.replace(
        assignments,
        expert_ids=jnp.where(is_kept, assignments.expert_ids, num_experts + num_free),
        gates=jnp.where(is_kept, assignments.gates, 0.0),
    )


def _first(
    expert_ids: Int[Array, " A"], order: Float[Array, " A"], capacity: Int[Array, " E"]
) -> Bool[Array, " A"]:
    """Return whether each slot is within the capacity of its expert by `order`; ties by slot."""
    slots = jnp.arange(expert_ids.shape[0], dtype=jnp.int32)
    sorted_ids, _, by_expert = jax.lax.sort((expert_ids, order, slots), num_keys=2, is_stable=True)
    first_of_expert = jnp.searchsorted(sorted_ids, sorted_ids, side="left").astype(jnp.int32)
    rank = slots - first_of_expert
    is_kept = rank < capacity.at[sorted_ids].get(mode="fill", fill_value=0)
    return is_kept[jnp.argsort(by_expert)]
