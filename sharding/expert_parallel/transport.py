# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sends rows to their experts and back (`exchange`), by a ragged or an equal all-to-all.

P devices, sender s, receiver r; n[s, g] rows of sender s are for expert g of E, e = E / P of which
each receiver holds. All devices first share n, an all-gather of (P - 1) E integers received. Then

    ragged   jax.lax.ragged_all_to_all, one slice for every pair of sender and expert: a device
             sends only rows for others, about (P - 1)/P K T of D values. They arrive sorted by
             expert:
                 row 0 of (s, g) goes to     sum_{h < g, same receiver} sum_q n[q, h]
                                           + sum_{q < s} n[q, g]
             On accelerators only.
    equal    jax.lax.all_to_all of equal blocks of C rows, (P - 1) C D values from each device
             even if few are filled, and a sort by expert on arrival. On all platforms.

Gates travel with their rows, 4 bytes each. The way back is the same with sender and receiver
exchanged, and the gradient of each way is the other one. `C` is the most that may travel between
two devices; P C rows are allocated on arrival.

JAX's own gradient of a ragged exchange first exchanges the offsets, in two small ones; here they
are known. The ragged form has been compiled for TPUs and compared, in value and gradient, on an
emulation of the primitive; it has not run on an accelerator.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.jax_versions import match_varying
from sharding.expert_parallel.dispatched import Dispatched, ExpertAxes
from sharding.expert_parallel.permute import (
    ORDER,
    Permutation,
    move_rows,
    permute_rows,
    sort_by_expert,
)

Transport = Literal["ragged", "equal"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransportChoice:
    """A transport and the reason for it."""

    transport: Transport
    reason: str


def choose_transport(requested: Transport | None = None) -> TransportChoice:
    """Return the transport that a dispatcher with `transport=requested` uses, and the reason.

    The platform is that of the current mesh, so that a plan for absent devices contains the program
    that will run there; without a mesh it is that of this process.

    Args:
        requested: Name of a transport; None: the one that sends least and runs there.

    Raises:
        ValueError: It does not run there.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    if requested is None and platform == "cpu":
        reason = "a ragged all-to-all does not exist on cpu"
        return TransportChoice(transport="equal", reason=reason)
    if requested is None:
        return TransportChoice(transport="ragged", reason="it sends nothing but rows")
    if requested == "ragged" and platform == "cpu":
        raise ValueError(
            "execution.dispatcher.transport='ragged' does not exist on cpu: set it to 'equal', or"
            " to None, which picks what runs"
        )
    return TransportChoice(transport=requested, reason="asked for by name")


@dataclasses.dataclass(frozen=True, slots=True)
class Exchanged:
    """Rows where their experts are."""

    rows: Float[Array, "R D"]
    """Sorted by expert."""
    group_sizes: Int[Array, " e"]
    """Rows of each expert held here."""
    gates: Float[Array, " R"]
    """Gate of each row."""
    undo: Callable[[Float[Array, "R D"]], Float[Array, "A D"]]
    """Returns outputs to their senders, 0 for empty slots."""

    def dispatch_results(self, weights: Any, dropped: Float[Array, " E"]) -> Dispatched:
        """Return what a dispatcher that sends rows returns.

        Args:
            weights: Pytree of arrays [e ...] of the experts that compute these rows.
            dropped: Dropped assignments, by expert.
        """
        return Dispatched(
            rows=self.rows,
            group_sizes=self.group_sizes,
            gates=self.gates,
            weights=weights,
            undo=self.undo,
            dropped=dropped,
        )


def exchange(
    rows: Float[Array, "A D"],
    gates: Float[Array, "A 1"],
    expert_ids: Int[Array, " A"],
    *,
    num_experts: int,
    most: int,
    axes: ExpertAxes,
    transport: Transport | None,
) -> Exchanged:
    """Send each row to the device of its expert.

    Args:
        rows: Rows of this device.
        gates: Gates of the rows.
        expert_ids: Expert of each row in [0, E]; rows with E are not sent.
        num_experts: E.
        most: C, at least the rows that any device has for any other.
        axes: Mesh axes over which experts are sharded.
        transport: Transport; see `choose_transport`.
    """
    num_local = axes.experts_held(num_experts)
    order = sort_by_expert(expert_ids, num_experts)
    sizes = jax.lax.all_gather(order.group_sizes, axes.expert)  # [P E], by sender
    sizes = checkpoint_name(sizes, ORDER)
    travel = _send_ragged if choose_transport(transport).transport == "ragged" else _equal
    ids = expert_ids.astype(jnp.int32)
    return travel(_Trip(rows, gates, ids, order, sizes, num_local, most, axes.expert))


class _Trip(NamedTuple):
    """Rows of this device that are sent."""

    rows: Float[Array, "A D"]
    gates: Float[Array, "A 1"]
    expert_ids: Int[Array, " A"]
    order: Permutation
    sizes: Int[Array, "P E"]
    """Rows of each expert, by sender."""
    held: int
    most: int
    axes: tuple[str, ...]


def _send_ragged(trip: _Trip) -> Exchanged:
    rows, gates, _, order, sizes, num_local, most, axes = trip
    devices = sizes.shape[0]
    by_receiver = sizes.sum(0).reshape(devices, num_local)
    # Where the rows of each pair of sender and expert start: at the sender, at the receiver.
    leaves = _starts(sizes)
    lands = _starts(by_receiver).reshape(1, -1) + jnp.cumsum(sizes, 0) - sizes
    (sent, received), (leave_here, left_there), (land_there, landed_here) = (
        _of_this_device(table, num_local, axes) for table in (sizes, leaves, lands)
    )
    outward = _Slices(leave_here, sent, land_there, received, num_rows=devices * most)
    back = _Slices(landed_here, received, left_there, sent, num_rows=rows.shape[0])

    def send(rows: Array) -> Array:
        return _travel(permute_rows(rows, order.order, order.inverse), outward, back, axes)

    return Exchanged(
        rows=send(rows),
        gates=send(gates)[:, 0],
        group_sizes=received.reshape(devices, num_local).sum(0),
        undo=lambda outputs: permute_rows(
            _travel(outputs, back, outward, axes), order.inverse, order.order
        ),
    )


def _equal(trip: _Trip) -> Exchanged:
    rows, gates, expert_ids, order, sizes, num_local, most, axes = trip
    devices = sizes.shape[0]
    nowhere = sizes.shape[0] * most
    sent, received = (
        part.reshape(devices, num_local) for part in _of_this_device(sizes, num_local, axes)
    )
    # Rows sorted by expert are sorted by receiver: its block holds them from `starts` on.
    starts = _starts(sent.sum(1)[None])[0]
    places = jnp.arange(most, dtype=jnp.int32)[None, :]
    slots = order.order.at[starts[:, None] + places].get(mode="clip")
    slots = jnp.where(places < sent.sum(1)[:, None], slots, rows.shape[0]).reshape(-1)
    receiver = jnp.minimum(expert_ids // num_local, devices - 1)
    targets = receiver * most + order.inverse - starts[receiver]
    targets = jnp.where(expert_ids < sizes.shape[1], targets, nowhere)

    # On arrival every block is sorted by expert, and the missing of its C rows are in no group.
    missing = most - received.sum(1, keepdims=True)
    runs = jnp.concatenate([received, missing], 1).reshape(-1)
    owners = jnp.tile(jnp.arange(num_local + 1, dtype=jnp.int32), devices)
    regroup = sort_by_expert(jnp.repeat(owners, runs, total_repeat_length=nowhere), num_local)

    def swap(blocks: Array) -> Array:
        return jax.lax.all_to_all(blocks, axes, split_axis=0, concat_axis=0, tiled=True)

    def undo(outputs: Array) -> Array:
        return move_rows(
            swap(permute_rows(outputs, regroup.inverse, regroup.order)), targets, slots
        )

    def send(rows: Array) -> Array:
        arrived = swap(move_rows(rows, slots, targets))
        return permute_rows(arrived, regroup.order, regroup.inverse)

    return Exchanged(
        rows=send(rows),
        gates=send(gates)[:, 0],
        group_sizes=regroup.group_sizes,
        undo=undo,
    )


def _starts(sizes: Int[Array, "n m"]) -> Int[Array, "n m"]:
    """Return the start of each of consecutive runs, row by row."""
    return jnp.cumsum(sizes, 1) - sizes


def _of_this_device(
    table: Int[Array, "P E"], num_local: int, axes: tuple[str, ...]
) -> tuple[Int[Array, " E"], Int[Array, " n"]]:
    """Return what this device sends and receives, from a table by sender and expert."""
    device = jax.lax.axis_index(axes).astype(jnp.int32)
    received = jax.lax.dynamic_slice_in_dim(table, device * jnp.int32(num_local), num_local, axis=1)
    return jax.lax.dynamic_index_in_dim(table, device, keepdims=False), received.reshape(-1)


# Not checked at run time: tree functions also fill it with what is no array.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Slices:
    """Arguments of `jax.lax.ragged_all_to_all`: slices by receiver, and sizes by sender."""

    input_offsets: Int[Array, " E"]
    send_sizes: Int[Array, " E"]
    output_offsets: Int[Array, " E"]
    recv_sizes: Int[Array, " E"]
    num_rows: int = dataclasses.field(metadata={"static": True})
    """Rows allocated on arrival."""


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _travel(
    rows: Float[Array, "n D"], outward: _Slices, back: _Slices, axes: tuple[str, ...]
) -> Float[Array, "m D"]:
    """Return the rows of these slices, and 0 between them; the gradient takes the way back."""
    del back
    empty = match_varying(jnp.zeros((outward.num_rows, rows.shape[1]), rows.dtype), rows)
    return jax.lax.ragged_all_to_all(
        rows,
        empty,
        outward.input_offsets,
        outward.send_sizes,
        outward.output_offsets,
        outward.recv_sizes,
        axis_name=axes,
    )


def _travel_forward(rows, outward, back, axes):
    return _travel(rows, outward, back, axes), (outward, back)


def _travel_backward(axes, ways, gradient):
    outward, back = ways
    return _travel(gradient, back, outward, axes), None, None


_travel.defvjp(_travel_forward, _travel_backward)
