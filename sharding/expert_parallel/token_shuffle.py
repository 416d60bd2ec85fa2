# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Speculative token shuffling: tokens wait on the device where their experts probably are.

    device, confidence = predict(...)         by token id, or by the device of the layer below
    order, inverse     = shuffle(...)         T/P tokens for every device
    x_local = shuffled_reduce_scatter(x, order, axis_name)       after attention
    x       = shuffled_all_gather(x_local, inverse, axis_name)   before the next layer

In place of the reduce-scatter and the all-gather that attention under tensor parallelism has
anyway: the same bytes, and the all-to-all of the experts between them has fewer tokens to move
(alpha k S/P of each device's, alpha the share of assignments that are not local). A wrong guess
costs a transfer and changes no result.

`shuffle` is exact about numbers: where more than T/P tokens are predicted for a device the most
confident stay, and the others fill the places left.

Source: Speculative MoE (arXiv 2503.04398): s-TS. The tables come from
`jaxmoe.planning.placement.token_tables`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenTables:
    """The likeliest device of a token and its probability, by what is known before routing."""

    id_device: Int[Array, "*L V"]
    """By token id."""
    id_confidence: Float[Array, "*L V"]
    """0 for ids that nobody has seen."""
    next_device: Int[Array, "*L P"]
    """By the device in the MoE layer below."""
    next_confidence: Float[Array, "*L P"]
    """0 for devices that nobody came from, and in the first layer."""


def predict(
    tables: TokenTables, token_ids: Int[Array, " T"], below: Int[Array, " T"]
) -> tuple[Int[Array, " T"], Float[Array, " T"]]:
    """The device of each token by the more confident of the two tables (by id at a draw).

    Args:
        tables: of one layer.
        token_ids: in [0, V).
        below: device in the MoE layer below; -1 where there is none.
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
    """An order of the tokens of which device c has the part from c T/P on, and its inverse.

    Args:
        device: where each token wants to be.
        confidence: who goes first where a device has not places enough; the earlier of equals.
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
    # Every place is taken once: by whoever wants it, or by the next of those who are left over.
    is_taken = (
        jnp.zeros(num_tokens, bool).at[jnp.where(is_in, wanted, num_tokens)].set(True, mode="drop")
    )
    free = jnp.argsort(is_taken, stable=True).astype(jnp.int32)
    left_over = jnp.cumsum(~is_in, dtype=jnp.int32) - 1
    place = jnp.where(is_in, wanted, free[jnp.where(is_in, 0, left_over)])
    inverse = jnp.zeros(num_tokens, jnp.int32).at[queue].set(place)
    return jnp.argsort(inverse).astype(jnp.int32), inverse


def shuffled_reduce_scatter(
    x: Float[Array, "T D"], order: Int[Array, " T"], axis_name: str
) -> Float[Array, "t D"]:
    """The sum over the axis of partial results, of which each device gets its tokens.

    Args:
        x: partial, of all tokens.
        order: from `shuffle`, the same on every device.
        axis_name: mesh axis of P devices.
    """
    return jax.lax.psum_scatter(x[order], axis_name, scatter_dimension=0, tiled=True)


def shuffled_all_gather(
    x: Float[Array, "t D"], inverse: Int[Array, " T"], axis_name: str
) -> Float[Array, "T D"]:
    """All tokens on every device, in the order that they had before `shuffled_reduce_scatter`."""
    return jax.lax.all_gather(x, axis_name, axis=0, tiled=True)[inverse]
