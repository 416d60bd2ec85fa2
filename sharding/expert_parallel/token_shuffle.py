# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Speculative token shuffling: assigns tokens to the devices where their experts probably are.

    device, confidence = predict(...)         by token id, or by the device of the layer below
    order, inverse     = shuffle(...)         T/P tokens for every device

In Speculative MoE (arXiv 2503.04398, s-TS) the reduce-scatter after attention under tensor
parallelism and the all-gather before the next layer move tokens in this order, with the same bytes
as without it, and the all-to-all of the experts between them has fewer rows to move (alpha k S/P of
each device's, alpha the fraction of assignments that are not local). A wrong prediction costs a
transfer and changes no result.

The forward pass does not shuffle. `python -m experiments.place` measures on a routing trace what
shuffling would gain: its column `local` is the fraction of assignments whose expert is on the
device that `shuffle` chose. The tables come from `jaxmoe.planning.placement.token_tables`.

`shuffle` balances exactly: where more than T/P tokens are predicted for a device the most confident
stay, and the others fill the remaining places.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenTables:
    """Likeliest device of a token and its probability, by features known before routing."""

    id_device: Int[Array, "*L V"]
    """Device by token id."""
    id_confidence: Float[Array, "*L V"]
    """Probability by token id; 0 for ids that were not in the trace."""
    next_device: Int[Array, "*L P"]
    """Device by the device in the MoE layer below."""
    next_confidence: Float[Array, "*L P"]
    """Probability by the device below; 0 for devices not in the trace, and in the first layer."""


def predict(
    tables: TokenTables, token_ids: Int[Array, " T"], below: Int[Array, " T"]
) -> tuple[Int[Array, " T"], Float[Array, " T"]]:
    """Return the device of each token by the more confident of the two tables (ties: by id).

    Args:
        tables: Tables of one layer.
        token_ids: Values in [0, V).
        below: Device in the MoE layer below; -1 where there is none.
    """
    by_id = (tables.id_device[token_ids], tables.id_confidence[token_ids])
    has_below = below >= 0
    row = jnp.where(has_below, below, 0)
    confidence = jnp.where(has_below, tables.next_confidence[row], 0.0)
    is_surer = confidence > by_id[1]
    device = jnp.where(is_surer, tables.next_device[row], by_id[0])
    return device, jnp.where(is_surer, confidence, by_id[1])


def shuffle(
    device: Int[Array, " T"], confidence: Float[Array, " T"], num_devices: int
) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Return an order of the tokens in which device c has the part from c T/P on, and its inverse.

    Args:
        device: Predicted device of each token.
        confidence: Priority of tokens where a device has too few places; ties go to the earlier.
        num_devices: P.

    Raises:
        ValueError: P does not divide T.
    """
    num_tokens = device.shape[0]
    if num_tokens % num_devices:
        raise ValueError(
            f"token shuffling: {num_tokens} tokens cannot be shared equally by {num_devices}"
            " devices: make the number of tokens a multiple of it"
        )
    places = num_tokens // num_devices
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    by_device, _, queue = jax.lax.sort((device, -confidence, tokens), num_keys=2, is_stable=True)
    # The place of each token in its device's queue.
    first = jnp.searchsorted(by_device, by_device, side="left").astype(jnp.int32)
    rank = tokens - first
    is_in = rank < places
    wanted = by_device.astype(jnp.int32) * places + rank
    # Every place is filled once: by a token predicted for it, or by the next leftover token.
    is_taken = (
        jnp.zeros(num_tokens, bool).at[jnp.where(is_in, wanted, num_tokens)].set(True, mode="drop")
    )
    free = jnp.argsort(is_taken, stable=True).astype(jnp.int32)
    left_over = jnp.cumsum(~is_in, dtype=jnp.int32) - 1
    place = jnp.where(is_in, wanted, free[jnp.where(is_in, 0, left_over)])
    inverse = jnp.zeros(num_tokens, jnp.int32).at[queue].set(place)
    return jnp.argsort(inverse).astype(jnp.int32), inverse
