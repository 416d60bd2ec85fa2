# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Speculative token shuffling: moves tokens to the devices where their experts probably are.

    device, confidence = predict(...)         by token id, or by the device of the layer below
    order, inverse     = shuffle(...)         T/P tokens for every device
    moved              = order.send(...)      an all-to-all of equal blocks
    y                  = order.undo(...)      the way back

In Speculative MoE (arXiv 2503.04398, s-TS) the reduce-scatter after attention under tensor
parallelism and the all-gather before the next layer move tokens in this order, with the same bytes
as without it, and the all-to-all of the experts between them has fewer rows to move. Here the axes
of the experts are batch axes for attention and tokens differ on all of them, so shuffling is an
all-to-all of its own around the dispatch. With P devices, T tokens of D values of b bytes and K
experts a token, L the share of assignments whose expert is on the token's device after shuffling,
a device sends in the forward pass, and as much in the backward pass:

    without            2 K (P - 1)/P T D b                if loads are balanced
    with               2 K (1 - L) T D b                  rows to experts on other devices
                     + 2 (P - 1)/P T D b                  tokens and sums
                     +   (P - 1)/P T 2 K 4                experts and gates, f32

It pays where L - 1/P > (P - 1)/(P K), with a transport that sends rows alone (`ragged`); `equal`
blocks have the size of the worst case whatever L is, and shuffling only adds bytes. The prediction
needs no router, so the tokens can travel while the router computes.

Tokens are routed where they were, before they move: experts, gates, statistics, noise and losses
are those of the unshuffled layer, and a wrong prediction costs a transfer and changes no result.

`shuffle` balances exactly: where more than T/P tokens are predicted for a device the most confident
stay, and the others fill the remaining places. Each device balances its own tokens, so that every
pair of devices exchanges T/P of them (the paper balances the tokens of all devices together).
`TokenTables` come from `jaxmoe.contrib.token_routes.traced_tables`; a file of them is read by
`token_tables.py`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.routing.telemetry.summary import LOCAL_ASSIGNMENTS
from sharding.expert_parallel.dispatched import ExpertAxes, Outgoing
from sharding.expert_parallel.permute import permute_rows
from sharding.expert_parallel.routes import TokenMoves


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
    check_moved(num_tokens, num_devices, is_token_major=True)
    places = num_tokens // num_devices
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    by_device, _, queue = jax.lax.sort((device, -confidence, tokens), num_keys=2, is_stable=True)
    # The place of each token in its device's queue.
    first = jnp.searchsorted(by_device, by_device, side="left").astype(jnp.int32)
    rank = tokens - first
    is_in = rank < places
    target_places = by_device.astype(jnp.int32) * places + rank
    # Every place is filled once: by a token predicted for it, or by the next leftover token.
    is_taken = (
        jnp.zeros(num_tokens, bool)
        .at[jnp.where(is_in, target_places, num_tokens)]
        .set(True, mode="drop")
    )
    free = jnp.argsort(is_taken, stable=True).astype(jnp.int32)
    left_over = jnp.cumsum(~is_in, dtype=jnp.int32) - 1
    place = jnp.where(is_in, target_places, free[jnp.where(is_in, 0, left_over)])
    inverse = jnp.zeros(num_tokens, jnp.int32).at[queue].set(place)
    return jnp.argsort(inverse).astype(jnp.int32), inverse


def check_moved(num_tokens: int, num_devices: int, *, is_token_major: bool) -> None:
    """Check that the tokens of a device can move to other devices.

    Args:
        num_tokens: T.
        num_devices: P.
        is_token_major: Whether tokens choose experts, K for each.

    Raises:
        ValueError: P does not divide T, or experts choose tokens.
    """
    if not is_token_major:
        raise ValueError(
            "execution.dispatcher.token_tables moves tokens with their experts, and with this"
            " router experts choose tokens: leave token_tables out"
        )
    if num_tokens % num_devices:
        raise ValueError(
            f"token shuffling: the {num_tokens} tokens of a device must be divisible by the"
            f" {num_devices} devices of the expert axes, which share them equally: change"
            " training.batch_size, training.sequence_length or training.accumulation, or leave"
            " execution.dispatcher.token_tables out"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShuffledTokens(TokenMoves):
    """Order in which the tokens of a device travel: T/P for each device of the expert axes."""

    order: Int[Array, " T"]
    """Token at each place; those of device c from place c T/P on."""
    inverse: Int[Array, " T"]
    """Place of each token."""

    def send(self, outgoing: Outgoing) -> Outgoing:
        """Send the tokens with their assignments; return those that arrive, T again."""
        assignments = outgoing.assignments
        axes = outgoing.axes
        top_k = assignments.top_k
        num_tokens = outgoing.x.shape[0]
        check_moved(num_tokens, 1, is_token_major=top_k is not None)
        assert top_k is not None
        # Numbers of experts are exact in f32; one exchange brings them and the gates.
        slots = [assignments.expert_ids.astype(jnp.float32), assignments.gates.astype(jnp.float32)]
        slots = jnp.concatenate([part.reshape(num_tokens, top_k) for part in slots], axis=1)
        x, slots = (
            _swap(permute_rows(rows, self.order, self.inverse), axes)
            for rows in (outgoing.x, slots)
        )
        arrived = dataclasses.replace(
            assignments,
            expert_ids=slots[:, :top_k].reshape(-1).astype(assignments.expert_ids.dtype),
            gates=slots[:, top_k:].reshape(-1).astype(assignments.gates.dtype),
        )
        return dataclasses.replace(outgoing, x=x, assignments=arrived)

    def undo(self, y: Float[Array, "T D"], axes: ExpertAxes) -> Float[Array, "T D"]:
        """Return rows to the devices and places from which `send` sent them."""
        return permute_rows(_swap(y, axes), self.inverse, self.order)

    def measures(
        self, expert_ids: Int[Array, "T K"], num_experts: int, axes: ExpertAxes
    ) -> dict[str, Array]:
        """Return the local assignments; see `count_local`."""
        return {LOCAL_ASSIGNMENTS: count_local(expert_ids, self, num_experts, axes)}

    def carry_tokens(
        self, expert_ids: Int[Array, "T K"], num_experts: int, axes: ExpertAxes
    ) -> Int[Array, " T"]:
        """Return the device with most of a token's experts; see `homes`."""
        return homes(expert_ids, num_experts, axes)


def order_tokens(
    tables: TokenTables,
    token_ids: Int[Array, " T"],
    token_mask: Bool[Array, " T"],
    below: Int[Array, " T"],
    num_devices: int,
) -> ShuffledTokens:
    """Return the order of the tokens of one device by their predicted devices.

    Args:
        tables: Tables of one layer.
        token_ids: Values in [0, V).
        token_mask: False for padding, which takes the places that are left.
        below: Device in the MoE layer below; -1 where there is none.
        num_devices: P.

    Raises:
        ValueError: P does not divide T.
    """
    device, confidence = predict(tables, token_ids, below)
    priority = jnp.where(token_mask, confidence, -1.0)
    return ShuffledTokens(*shuffle(device, priority, num_devices))


def _swap(rows: Float[Array, "T n"], axes: ExpertAxes) -> Float[Array, "T n"]:
    """Exchange equal blocks of rows: block c goes to device c. Its own inverse."""
    return jax.lax.all_to_all(rows, axes.expert, split_axis=0, concat_axis=0, tiled=True)


def count_local(
    expert_ids: Int[Array, "T K"], tokens: ShuffledTokens, num_experts: int, axes: ExpertAxes
) -> Float[Array, " 3"]:
    """Return the assignments of this device's tokens: all, local after shuffling, and without it.

    Args:
        expert_ids: Values in [0, E]; E marks an empty slot.
        tokens: Order in which the tokens travel.
        num_experts: E.
        axes: Mesh axes of the experts.
    """
    devices = jax.lax.axis_size(axes.expert)
    holder = expert_ids // axes.experts_held(num_experts)  # of the expert; P for an empty slot
    moved = tokens.inverse // (tokens.inverse.shape[0] // devices)
    still = jax.lax.axis_index(axes.expert)
    masks = [expert_ids < num_experts, holder == moved[:, None], holder == still]
    return jnp.stack([is_one.sum(dtype=jnp.float32) for is_one in masks])


def homes(expert_ids: Int[Array, "T K"], num_experts: int, axes: ExpertAxes) -> Int[Array, " T"]:
    """Return the device with most of a token's experts, the lowest of equals; -1 for none.

    Args:
        expert_ids: Values in [0, E]; E marks an empty slot.
        num_experts: E.
        axes: Mesh axes of the experts.
    """
    devices = jnp.arange(jax.lax.axis_size(axes.expert), dtype=expert_ids.dtype)
    holder = expert_ids // axes.experts_held(num_experts)
    num_held = (holder[:, :, None] == devices[None, None, :]).sum(1)  # T, P
    best = jnp.argmax(num_held, axis=1).astype(jnp.int32)
    return jnp.where(num_held.max(1) > 0, best, -1)
